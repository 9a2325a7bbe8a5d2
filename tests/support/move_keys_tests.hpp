// Moves keys and values from a place of any form to one of any other, on every device. Every byte
// must be where the shapes of both say, and nothing else is written.
#pragma once

#include <numeric>
#include <utility>

#include "kernels/move_keys.hpp"
#include "tests/support/key_place.hpp"
#include "tests/support/on_device.hpp"

namespace longspan::tests {

class MoveKeys : public OnDevice {
 protected:
  static constexpr int kBatch = 3;

  KeyPlace draw(Form form, const KeyShape& shape, const std::vector<std::int64_t>& keys) {
    KeyPlace place{.form = form, .shape = shape};
    place.capacity = *std::max_element(keys.begin(), keys.end()) + below(3);
    std::int64_t rows = below(3);
    for (const std::int64_t n : keys) {
      place.start.push_back(rows);
      rows += n + below(3);
    }
    if (!place.in_pages()) return place;
    place.page = static_cast<int>(1 + below(20));
    place.columns = (place.capacity + place.page - 1) / place.page + 1;
    place.pages = place.columns * kBatch;
    place.table.resize(static_cast<std::size_t>(place.pages));
    std::iota(place.table.begin(), place.table.end(), 0);
    std::shuffle(place.table.begin(), place.table.end(), random_);
    return place;
  }
  static std::int64_t rows_of(const KeyPlace& place, const std::vector<std::int64_t>& keys) {
    return std::max(kBatch * place.capacity, place.start.back() + keys.back() + 2);
  }

  /// Runs over some of the keys: from ascending keys to others.
  std::vector<kernels::KeyRun> draw_runs(const std::vector<std::int64_t>& keys) {
    std::vector<kernels::KeyRun> runs;
    for (int b = 0; b < kBatch; ++b) {
      std::vector<kernels::KeyRun> own;
      for (std::int64_t key = 0; key < keys[b];) {
        const auto count = static_cast<std::int32_t>(
            std::min(keys[b] - key, 1 + below(kernels::KeyRun::kMostKeys)));
        if (below(5) > 0) own.push_back({key, keys[b] - key - count, b, count});
        key += count;
      }
      std::shuffle(own.begin(), own.end(), random_);
      runs.insert(runs.end(), own.begin(), own.end());
    }
    return runs;
  }

  void expect_moved(const KeyPlace& from, const KeyPlace& to, const std::vector<std::int64_t>& keys,
                    bool has_values) {
    const KeyShape& s = from.shape;
    const auto size = static_cast<std::int64_t>(size_of(s.dtype));
    const auto memory_of = [&](const KeyPlace& place, bool is_key) {
      return static_cast<std::size_t>(place.size(is_key, rows_of(place, keys)) * size);
    };
    std::vector<std::byte> source[2], expected[2];
    for (const bool is_key : {false, true}) {
      source[is_key].resize(memory_of(from, is_key));
      for (std::byte& byte : source[is_key]) byte = static_cast<std::byte>(below(256));
      expected[is_key].assign(memory_of(to, is_key), std::byte{0xff});
    }
    const std::vector<kernels::KeyRun> runs = draw_runs(keys);
    for (const kernels::KeyRun& run : runs)
      for (std::int64_t i = 0; i < run.count; ++i)
        for (const bool is_key : {false, true})
          for (int e = 0; e < s.kv_heads * from.width(is_key); ++e) {
            if (!is_key && !has_values) continue;
            const int head = e / from.width(is_key), d = e % from.width(is_key);
            const std::int64_t a = from.at(is_key, run.sequence, run.from_key + i, head, d);
            const std::int64_t b = to.at(is_key, run.sequence, run.to_key + i, head, d);
            if (a < 0 || b < 0) continue;
            // Where keys and values share memory, it is the memory of keys.
            const bool source_of = is_key || from.form == Form::together;
            const bool target_of = is_key || to.form == Form::together;
            std::memcpy(expected[target_of].data() + b * size, source[source_of].data() + a * size,
                        static_cast<std::size_t>(size));
          }

    const DeviceArray<std::byte> from_v = on_device(source[0]), from_k = on_device(source[1]);
    const auto to_v = poisoned<std::byte>(expected[0].size()),
               to_k = poisoned<std::byte>(expected[1].size());
    const auto from_table = on_device(from.table), to_table = on_device(to.table);
    const auto from_start = on_device(from.start), to_start = on_device(to.start);
    const auto list = on_device(runs);
    const auto store = [&](const KeyPlace& place, std::byte* k, std::byte* v,
                           const std::int32_t* table, const std::int64_t* start) {
      kernels::KeyStore at{.k = place.layout(true), .v = place.layout(false)};
      const std::int64_t aside = place.form == Form::together ? s.kv_heads * s.dim : 0;
      at.k.data = k + s.offset * size;
      if (has_values) at.v.data = (aside > 0 ? k : v) + (s.offset + aside) * size;
      if (place.in_pages())
        at.pages = {table, place.columns, 1, place.columns, place.pages, place.page};
      if (place.form == Form::rows || place.form == Form::together) at.start = start;
      if (place.form == Form::batch) at.pitch = place.capacity;
      return at;
    };
    backend().move_keys(
        {.from = store(from, from_k.data(), from_v.data(), from_table.data(), from_start.data()),
         .to = store(to, to_k.data(), to_v.data(), to_table.data(), to_start.data()),
         .runs = list.data(),
         .count = static_cast<std::int64_t>(runs.size()),
         .dtype = s.dtype,
         .kv_heads = s.kv_heads,
         .head_dim = s.dim,
         .value_dim = s.value_dim},
        {});
    EXPECT_TRUE(to_k.values() == expected[1]) << "keys";
    EXPECT_TRUE(to_v.values() == expected[0]) << "values";
  }

  std::vector<std::int64_t> draw_keys() { return {1 + below(90), below(3), 1 + below(40)}; }
};

TEST_F(MoveKeys, OfEveryTypeFromEveryFormToEveryForm) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::e5m2})
    for (const Form from : kForms)
      for (const Form to : kForms)
        for (const int gap : {0, 3}) {
          KeyShape shape{.dtype = dtype};
          shape.gap = gap;
          shape.offset = gap == 0 ? 0 : static_cast<int>(below(9));
          shape.x = is_fp8(dtype) ? 8 : static_cast<int>(16 / size_of(dtype));
          SCOPED_TRACE(std::string(name(dtype)) + " form " +
                       std::to_string(static_cast<int>(from)) + " to " +
                       std::to_string(static_cast<int>(to)) + " gap " + std::to_string(gap));
          const std::vector<std::int64_t> keys = draw_keys();
          expect_moved(draw(from, shape, keys), draw(to, shape, keys), keys, true);
        }
}

TEST_F(MoveKeys, OfAnyWidth) {
  for (const auto& [heads, dim, value_dim] :
       {std::tuple{1, 1, 3}, {1, 576, 64}, {8, 128, 128}, {3, 20, 12}, {5, 8, 0}}) {
    const KeyShape shape{
        .dtype = DType::fp16, .kv_heads = heads, .dim = dim, .value_dim = value_dim};
    SCOPED_TRACE("heads " + std::to_string(heads) + " dim " + std::to_string(dim));
    const std::vector<std::int64_t> keys = draw_keys();
    expect_moved(draw(Form::pages, shape, keys), draw(Form::together, shape, keys), keys,
                 value_dim > 0);
    expect_moved(draw(Form::together, shape, keys), draw(Form::rows, shape, keys), keys,
                 value_dim > 0);
  }
}

/// The targets of such entries are neither read nor written.
TEST_F(MoveKeys, EntriesThatAreNoPageAreLeftOut) {
  const KeyShape shape{.dtype = DType::bf16};
  const std::vector<std::int64_t> keys{70, 2, 31};
  for (const bool is_source : {false, true}) {
    KeyPlace from = draw(Form::pages, shape, keys), to = draw(Form::pages, shape, keys);
    KeyPlace& place = is_source ? from : to;
    place.table.front() = -1;
    place.table.back() = static_cast<std::int32_t>(place.pages);
    place.table[static_cast<std::size_t>(2 * place.columns)] = 0x7fffffff;
    expect_moved(from, to, keys, true);
  }
}

}  // namespace longspan::tests
