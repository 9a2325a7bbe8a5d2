#include "launcher/problem/latent_rows.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "launcher/problem/elements.hpp"
#include "longspan/stored_row.hpp"

namespace longspan::launcher {
namespace {

/// The nearest of the 16 numbers of four bits.
std::uint32_t nearest_fp4(float value) {
  std::uint32_t best = 0;
  for (std::uint32_t code = 0; code < 16; ++code)
    if (std::abs(element::widen_e2m1(code) - value) < std::abs(element::widen_e2m1(best) - value))
      best = code;
  return best;
}

/// Makes the scale of a group, also of formats that the library only reads.
float make_scale(const StoredRow& row, const RowFormat& f, int group, float amax) {
  if (f.scale == GroupScale::fp8_permuted) {
    store(row.scales, e4m3, 8 * (group % 4) + group / 4, std::max(amax / 6, 0x1p-9f));
  } else {
    RowFormat made = f;
    if (f.rule == ScaleRule::none) made.rule = ScaleRule::power_of_two;
    store_scale(row, f, group, scale_for(made, amax));
  }
  return load_scale(row, f, group);
}

void make_row(const StoredRow& row, const RowFormat& f, const float* numbers) {
  for (int c = 0; c < f.coded; c += f.group) {
    float amax = 0;
    for (int i = c; i < c + f.group; ++i) amax = std::max(amax, std::abs(numbers[i]));
    const float scale = make_scale(row, f, c / f.group, amax);
    for (int i = c; i < c + f.group; ++i) {
      if (f.code == Code::fp8)
        store_number(row, f, i, scale, numbers[i]);
      else
        row.data[i / 2] |= static_cast<std::byte>(nearest_fp4(numbers[i] / scale) << i % 2 * 4);
    }
  }
  for (int c = f.coded; c < f.dim; ++c) store_number(row, f, c, 1, numbers[c]);
}

}  // namespace

void store_in_rows(Problem& problem, DType format) {
  const RowFormat f = row_format_of(format);
  const Source drawn = problem.k;
  Source stored = drawn;
  stored.dtype = DType::uint8;
  stored.dim = f.bytes;
  const auto make = [drawn, f](std::int64_t key) {
    std::vector<float> numbers(static_cast<std::size_t>(f.dim));
    std::vector<float> elements(static_cast<std::size_t>(f.dim));  // room for any type
    drawn.read(key, 0, f.dim, elements.data());
    for (int c = 0; c < f.dim; ++c)
      numbers[static_cast<std::size_t>(c)] =
          static_cast<float>(load(elements.data(), drawn.dtype, c));
    std::vector<std::byte> bytes(static_cast<std::size_t>(f.bytes));
    make_row({bytes.data(), bytes.data() + f.scales_at}, f, numbers.data());
    return bytes;
  };
  stored.read = [make](std::int64_t key, std::int64_t first, std::int64_t count, void* to) {
    std::memcpy(to, make(key).data() + first, static_cast<std::size_t>(count));
  };
  problem.k.dtype = fp32;
  problem.k.read = [make, f](std::int64_t key, std::int64_t first, std::int64_t count, void* to) {
    std::vector<std::byte> bytes = make(key);
    const StoredRow row{bytes.data(), bytes.data() + f.scales_at};
    for (std::int64_t i = 0; i < count; ++i)
      store(to, fp32, i, load_number(row, f, static_cast<int>(first + i)));
  };
  problem.v = first_columns(problem.k, f.value_dim);
  problem.stored_k = std::move(stored);
  problem.options.values_in_keys = true;
  problem.options.dtypes.kv = format;
}

}  // namespace longspan::launcher
