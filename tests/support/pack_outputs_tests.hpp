// Copies a finished part and its lse to the place that they are sent from, bit for bit, on every
// device. Nothing else is written.
#pragma once

#include "tests/support/on_device.hpp"

namespace longspan::tests {

class PackOutputs : public OnDevice {
 protected:
  struct Layout {
    std::int64_t row_stride, head_stride, lse_row_stride, lse_head_stride;
    std::int64_t ahead;  // elements ahead of the first row
  };
  static constexpr std::int64_t kTokens = 13;
  static constexpr int kHeads = 3;
  /// The bytes of poisoned().
  static float poison() { return std::bit_cast<float>(0xffffffffu); }

  void expect_packed(DType dtype, int dim, const Layout& from, const Layout& to) {
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    const auto bytes_of = [&](const Layout& l) {
      return static_cast<std::size_t>(
          (l.ahead + (kTokens - 1) * l.row_stride + (kHeads - 1) * l.head_stride + dim) * size);
    };
    const auto logs_of = [&](const Layout& l) {
      return static_cast<std::size_t>((kTokens - 1) * l.lse_row_stride +
                                      (kHeads - 1) * l.lse_head_stride + 1);
    };
    std::vector<std::byte> part(bytes_of(from)), expected(bytes_of(to), std::byte{0xff});
    for (std::byte& byte : part) byte = static_cast<std::byte>(below(256));
    std::vector<std::uint32_t> lse(logs_of(from)), expected_lse(logs_of(to), 0xffffffffu);
    for (std::uint32_t& bits : lse) bits = random_();
    for (std::int64_t token = 0; token < kTokens; ++token)
      for (int head = 0; head < kHeads; ++head) {
        const auto at = [&](const Layout& l) {
          return (l.ahead + token * l.row_stride + head * l.head_stride) * size;
        };
        std::memcpy(expected.data() + at(to), part.data() + at(from),
                    static_cast<std::size_t>(dim * size));
        expected_lse[token * to.lse_row_stride + head * to.lse_head_stride] =
            lse[token * from.lse_row_stride + head * from.lse_head_stride];
      }
    const auto source = on_device(part);
    const auto source_lse = on_device(lse);
    const auto packed = poisoned<std::byte>(expected.size());
    const auto packed_lse = poisoned<std::uint32_t>(expected_lse.size());
    const auto rows = [&](std::byte* data, const Layout& l) {
      return kernels::Rows{data + l.ahead * size, l.row_stride, l.head_stride};
    };
    const auto logs = [](std::uint32_t* data, const Layout& l) {
      return kernels::LseView{reinterpret_cast<float*>(data), l.lse_row_stride, l.lse_head_stride};
    };
    backend().pack_outputs({.tokens = kTokens,
                            .heads = kHeads,
                            .dim = dim,
                            .dtype = dtype,
                            .from = rows(source.data(), from),
                            .to = rows(packed.data(), to),
                            .from_lse = logs(source_lse.data(), from),
                            .to_lse = logs(packed_lse.data(), to)},
                           {});
    EXPECT_EQ(packed.values(), expected) << name(dtype) << " dim " << dim;
    EXPECT_EQ(packed_lse.values(), expected_lse) << name(dtype) << " dim " << dim;
  }
};

TEST_F(PackOutputs, OfAnyTypeWithAnyStrides) {
  for (const DType dtype : {fp32, bf16, e5m2})
    for (const int dim : {1, 3, 8, 24, 64, 128, 600})
      for (const std::int64_t gap : {0, 1, 8}) {
        const Layout rows{kHeads * (dim + gap) + gap, dim + gap, kHeads, 1, gap};
        const Layout heads{dim, kTokens * dim + gap, 1, kTokens + gap, 0};
        expect_packed(dtype, dim, rows, rows);
        expect_packed(dtype, dim, rows, heads);
        expect_packed(dtype, dim, heads, rows);
      }
}

/// As wide a word as divides rows, strides and addresses, and no wider.
TEST_F(PackOutputs, InTheWidestWordThatFits) {
  const auto word = [](std::uintptr_t address, std::int64_t row_stride, std::int64_t head_stride,
                       int dim, DType dtype) {
    kernels::PackOutputsParams p;
    p.dim = dim;
    p.dtype = dtype;
    p.from = {reinterpret_cast<void*>(address), row_stride, head_stride};
    p.to = {reinterpret_cast<void*>(std::uintptr_t{4096}), 256, 64};
    return p.word();
  };
  EXPECT_EQ(word(4096, 256, 64, 64, bf16), 16);
  EXPECT_EQ(word(4104, 256, 64, 64, bf16), 8);
  EXPECT_EQ(word(4096, 252, 64, 64, bf16), 8);
  EXPECT_EQ(word(4096, 256, 66, 64, bf16), 4);
  EXPECT_EQ(word(4096, 256, 64, 65, bf16), 2);
  EXPECT_EQ(word(4097, 256, 64, 64, e4m3), 1);
  EXPECT_EQ(word(4096, 256, 64, 5, fp32), 4);
}

/// Rows of several slots go to the places of a map, except those past the batch. Sequences of the
/// place have gaps between them, and the lse may be omitted.
TEST_F(PackOutputs, FromSlotsToThePlacesOfAMap) {
  constexpr std::int64_t kSlots = 3, kRows = 5, kDim = 8, kSlot = kRows * kHeads * kDim + 16;
  constexpr std::int64_t kEach = 6, kGap = 40;  // tokens of a sequence, and floats between them
  constexpr std::int64_t kInBatch = 10;
  const std::vector<std::int64_t> map{0, 3, 6, 9, -1, 1, 4, 7, 10, -1, 2, 5, 8, 11, -1};
  std::vector<float> from(kSlots * kSlot), from_lse(kSlots * kRows * kHeads);
  for (float& value : from) value = normal();
  for (float& value : from_lse) value = normal();
  std::vector<float> expected(2 * kEach * kHeads * kDim + kGap, kNaN);
  std::vector<float> expected_lse(2 * kEach * kHeads, kNaN);
  for (std::int64_t i = 0; i < kSlots * kRows; ++i) {
    const std::int64_t token = map[i];
    if (token < 0 || token >= kInBatch) continue;
    for (std::int64_t c = 0; c < kHeads * kDim; ++c)
      expected[token * kHeads * kDim + token / kEach * kGap + c] =
          from[i / kRows * kSlot + i % kRows * kHeads * kDim + c];
    for (int h = 0; h < kHeads; ++h) expected_lse[token * kHeads + h] = from_lse[i * kHeads + h];
  }
  const auto source = on_device(from), source_lse = on_device(from_lse);
  const auto places = on_device(map);
  const auto starts = on_device(std::vector<std::int32_t>{0, 4, kInBatch});
  for (const bool with_lse : {false, true}) {
    const auto out = poisoned<float>(expected.size()), lse = poisoned<float>(expected_lse.size());
    kernels::PackOutputsParams p;
    p.tokens = kSlots * kRows;
    p.heads = kHeads;
    p.dim = kDim;
    p.dtype = fp32;
    p.from = {source.data(), kHeads * kDim, kDim, {kSlot - kRows * kHeads * kDim, kRows}};
    p.to = {out.data(), kHeads * kDim, kDim, {kGap, kEach}};
    p.from_lse = {source_lse.data(), kHeads, 1};
    if (with_lse) p.to_lse = {lse.data(), kHeads, 1};
    p.map = places.data();
    p.batch.size = 2;
    p.batch.query_start = starts.data();
    backend().pack_outputs(p, {});
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    const std::vector<float> none(expected_lse.size(), poison());
    for (float& value : expected)
      if (std::isnan(value)) value = poison();
    for (float& value : expected_lse)
      if (std::isnan(value)) value = poison();
    EXPECT_TRUE(same(out.values(), expected));
    EXPECT_TRUE(same(lse.values(), with_lse ? expected_lse : none));
  }
}

/// A map may give the source of rows, or only which rows exist.
TEST_F(PackOutputs, FromThePlacesOfAMapAndWhereThereIsOne) {
  using MapOf = kernels::PackOutputsParams::MapOf;
  constexpr std::int64_t kDim = 8;
  const std::vector<std::int64_t> map{4, -1, 0, 3, -1};
  std::vector<float> from(5 * kHeads * kDim), from_lse(5 * kHeads);
  for (float& value : from) value = normal();
  for (float& value : from_lse) value = normal();
  const auto source = on_device(from), source_lse = on_device(from_lse);
  const auto places = on_device(map);
  for (const MapOf of : {MapOf::sources, MapOf::presence}) {
    const auto out = poisoned<float>(from.size()), lse = poisoned<float>(from_lse.size());
    kernels::PackOutputsParams p;
    p.tokens = 5;
    p.heads = kHeads;
    p.dim = kDim;
    p.dtype = fp32;
    p.from = {source.data(), kHeads * kDim, kDim};
    p.to = {out.data(), kHeads * kDim, kDim};
    p.from_lse = {source_lse.data(), kHeads, 1};
    p.to_lse = {lse.data(), kHeads, 1};
    p.map = places.data();
    p.map_of = of;
    backend().pack_outputs(p, {});
    const std::vector<float> rows = out.values(), logs = lse.values();
    for (std::int64_t token = 0; token < 5; ++token) {
      const std::int64_t other = of == MapOf::sources ? map[token] : token;
      for (std::int64_t c = 0; c < kHeads * kDim; ++c) {
        const float found = rows[token * kHeads * kDim + c];
        if (map[token] < 0)
          EXPECT_TRUE(std::isnan(found)) << token;
        else
          EXPECT_EQ(found, from[other * kHeads * kDim + c]) << token;
      }
      for (int h = 0; h < kHeads && map[token] >= 0; ++h)
        EXPECT_EQ(logs[token * kHeads + h], from_lse[other * kHeads + h]);
    }
  }
}

/// Ranks' digests of a run are compared by the kernels of GPUs, and by the transport on CPUs.
TEST_F(PackOutputs, WritesNothingOfAnotherRun) {
  if (device() == Device::host) GTEST_SKIP() << "the transport compares";
  const std::vector<float> from(8, 1.0f);
  const auto source = on_device(from), out = poisoned<float>(8);
  const auto digests = on_device(std::vector<std::uint64_t>{7, 7, 8});
  const auto report = backend().shared_memory(sizeof(std::uint64_t));
  auto* const word = reinterpret_cast<std::uint64_t*>(report.get());
  kernels::PackOutputsParams p;
  p.tokens = 1;
  p.dim = 8;
  p.from = {source.data(), 8, 8};
  p.to = {out.data(), 8, 8};
  p.headers = {digests.data(), 1, 3, 5, word};
  backend().pack_outputs(p, {});
  EXPECT_TRUE(std::isnan(out.values()[0]));
  EXPECT_EQ(*word, kernels::RunHeaders::reported(5, 2));
  p.headers.ranks = 2;
  backend().pack_outputs(p, {});
  EXPECT_EQ(out.values(), from);
}

TEST_F(PackOutputs, OfNoTokens) {
  kernels::PackOutputsParams p;
  p.dim = 8;
  backend().pack_outputs(p, {});
}

}  // namespace longspan::tests
