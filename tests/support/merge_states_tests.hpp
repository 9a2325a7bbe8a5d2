// The edges of the merge of states: sinks of any type, fp8 with a scale, any dims, and rows that
// are not in the batch. On every device.
#pragma once

#include "tests/support/on_device.hpp"

namespace longspan::tests {

struct MergeCase {
  std::int64_t tokens = 9;
  int heads = 3, dim = 64, slots = 3;
  DType dtype = DType::fp32;
  std::optional<DType> sinks = {};
  std::optional<float> scale = {};
  bool inverse = false;
  int gap = 0;
  std::vector<std::int32_t> query_start = {};  // or none
  bool skip_decode = false;
  std::vector<std::int64_t> rows = {};  // or none

  std::int64_t row_stride() const { return std::int64_t{heads} * dim + gap; }
};

class MergeStates : public OnDevice {
 protected:
  std::vector<std::byte> memory_;
  kernels::StateSlots states_;
  std::vector<float> sinks_;

  void make(const MergeCase& c) {
    const std::int64_t rows = c.tokens * c.heads;
    memory_.assign(kernels::StateSlots::bytes(rows, c.dim) * c.slots, std::byte{0xff});
    states_ = {memory_.data(), rows, c.dim, c.slots};
    for (int s = 0; s < c.slots; ++s)
      for (std::int64_t row = 0; row < rows; ++row) {
        const bool empty = below(4) == 0;
        states_.stats(s)[row] =
            empty ? Stats{kNaN, 0.0f} : Stats{3 * normal(), 1 + std::abs(normal())};
        for (int d = 0; d < c.dim && !empty; ++d) states_.o(s, row)[d] = normal();
      }
    sinks_.clear();
    for (int h = 0; h < c.heads; ++h) {
      std::array<std::byte, 4> bytes{};
      store_element(bytes.data(), c.sinks.value_or(fp32), 0, 2 * normal());
      sinks_.push_back(load_element(bytes.data(), c.sinks.value_or(fp32), 0));
    }
  }

  struct Merged {
    std::vector<std::byte> out;
    std::vector<float> lse;
  };
  Merged merge(const MergeCase& c) const {
    const auto memory = on_device(memory_);
    std::vector<std::byte> sinks(c.heads * sizeof(float));
    for (int h = 0; h < c.heads; ++h)
      store_element(sinks.data(), c.sinks.value_or(fp32), h, sinks_[h]);
    const auto device_sinks = on_device(sinks);
    const auto scale = on_device(std::vector<float>{c.scale.value_or(1.0f)});
    const auto query_start = on_device(c.query_start);
    const auto rows = on_device(c.rows);
    const auto out = poisoned<std::byte>(c.tokens * c.row_stride() * size_of(c.dtype));
    const auto lse = poisoned<float>(c.tokens * c.heads);
    kernels::MergeParams p;
    p.states = states_;
    p.states.data = memory.data();
    p.heads = c.heads;
    if (c.sinks) p.sinks = {device_sinks.data(), *c.sinks};
    if (!c.rows.empty()) p.rows = rows.data();
    if (!c.query_start.empty()) {
      p.batch.size = static_cast<int>(c.query_start.size()) - 1;
      p.batch.query_start = query_start.data();
      p.batch.skip_decode = c.skip_decode;
    }
    p.tokens = c.tokens;
    p.dtype = c.dtype;
    if (c.scale) p.out_scale = {scale.data(), c.inverse};
    p.out = {out.data(), c.row_stride(), c.dim};
    p.lse = {lse.data(), c.heads, 1};
    backend().merge(p, {});
    return {out.values(), lse.values()};
  }

  /// Rows of `written` tokens are right, the others unchanged.
  void expect_right(const MergeCase& c, const std::vector<bool>& written) {
    make(c);
    const Merged merged = merge(c);
    for (std::int64_t token = 0; token < c.tokens; ++token)
      for (int h = 0; h < c.heads; ++h) {
        SCOPED_TRACE(::testing::Message() << "token " << token << " head " << h << " dim " << c.dim
                                          << " " << name(c.dtype) << " gap " << c.gap);
        const auto out = [&](int d) {
          return load_element(merged.out.data(), c.dtype, token * c.row_stride() + h * c.dim + d);
        };
        const float lse = merged.lse[token * c.heads + h];
        for (int d = c.dim; h + 1 == c.heads && d < c.dim + c.gap; ++d)
          ASSERT_TRUE(std::isnan(out(d))) << "past the last head";
        if (!written[token]) {
          ASSERT_TRUE(std::isnan(lse));
          for (int d = 0; d < c.dim; ++d) ASSERT_TRUE(std::isnan(out(d)));
          continue;
        }
        const std::int64_t row = (c.rows.empty() ? token : c.rows[token]) * c.heads + h;
        double sum = c.sinks ? std::exp(double{sinks_[h]}) : 0;
        std::vector<double> o(c.dim), size(c.dim);
        for (int s = 0; s < c.slots; ++s) {
          const Stats stats = states_.stats(s)[row];
          if (stats.sum == 0) continue;
          sum += stats.sum * std::exp2(double{stats.max});
          for (int d = 0; d < c.dim; ++d) {
            o[d] += states_.o(s, row)[d] * std::exp2(double{stats.max});
            size[d] += std::abs(states_.o(s, row)[d]) * std::exp2(double{stats.max});
          }
        }
        if (sum == 0)
          ASSERT_EQ(lse, -kInf);
        else
          ASSERT_NEAR(lse, std::log(sum), 2e-6 * (1 + std::abs(std::log(sum))));
        const double factor = !c.scale ? 1.0 : c.inverse ? *c.scale : 1.0 / *c.scale;
        for (int d = 0; d < c.dim; ++d) {
          double expected = sum == 0 ? 0 : o[d] / sum * factor;
          if (is_fp8(c.dtype)) expected = std::clamp(expected, -largest(c.dtype), largest(c.dtype));
          const double terms = sum == 0 ? 0 : size[d] / sum * factor;
          ASSERT_NEAR(out(d), expected, one_rounding(c.dtype, expected, 2 * terms)) << d;
        }
      }
  }
  void expect_right(const MergeCase& c) { expect_right(c, std::vector<bool>(c.tokens, true)); }
};

TEST_F(MergeStates, AnyDimAndEveryType) {
  for (int dim = 1; dim <= 256; dim += dim % 8 == 0 ? 5 : dim < 8 ? 1 : 3)
    for (DType dtype : {fp32, fp16, bf16, e4m3, e5m2})
      for (int gap : {0, 1, 8}) {
        MergeCase c{.tokens = 3, .dim = dim, .dtype = dtype};
        c.gap = gap;
        if (is_fp8(dtype)) c.scale = 0.05f;
        expect_right(c);
      }
}

TEST_F(MergeStates, SinksOfAnyTypeCountOnce) {
  for (DType sinks : {fp32, fp16, bf16})
    for (int slots : {1, 2, 5, 16}) {
      MergeCase c{.slots = slots, .sinks = sinks};
      expect_right(c);
    }
}

TEST_F(MergeStates, Fp8SaturatesAndNanStaysNan) {
  for (DType dtype : {e4m3, e5m2})
    for (bool inverse : {false, true}) {
      MergeCase c{.tokens = 50, .slots = 1, .dtype = dtype};
      c.scale = inverse ? 3e4f : 1e-5f;  // most values are too large
      c.inverse = inverse;
      expect_right(c);
      states_.stats(0)[7] = {kNaN, 1.0f};
      const Merged merged = merge(c);
      for (int d = 0; d < c.dim; ++d)
        EXPECT_TRUE(std::isnan(load_element(merged.out.data(), dtype, 7 * c.dim + d)));
      EXPECT_FALSE(std::isnan(load_element(merged.out.data(), dtype, 8 * c.dim)));
    }
}

/// The bits of element.hpp, on every kind of number: one state of sum 1, so that out = o.
TEST_F(MergeStates, RoundsAsElementsDo) {
  for (DType dtype : {fp16, bf16, e4m3, e5m2}) {
    MergeCase c{.tokens = 2000, .heads = 1, .slots = 1, .dtype = dtype};
    make(c);
    for (std::int64_t row = 0; row < c.tokens; ++row) {
      states_.stats(0)[row] = {0.0f, 1.0f};
      for (int d = 0; d < c.dim; ++d) {
        std::uint32_t bits = random_();
        if (d % 3 == 1) bits = (bits & 0x807fffffu) | (95u + bits % 60u) << 23;
        if (d % 3 == 2) bits = (bits & 0x80700000u) | (107u + bits % 37u) << 23 | 0x80000u;
        states_.o(0, row)[d] = std::bit_cast<float>(bits);
      }
    }
    const Merged merged = merge(c);
    for (std::int64_t i = 0; i < c.tokens * c.dim; ++i) {
      const float value = states_.o(0)[i];
      std::array<std::byte, 4> expected{};
      store_element(expected.data(), dtype, 0, value);
      if (std::isnan(value))
        ASSERT_TRUE(std::isnan(load_element(merged.out.data(), dtype, i)));
      else
        ASSERT_EQ(std::memcmp(&merged.out[i * size_of(dtype)], expected.data(), size_of(dtype)), 0)
            << name(dtype) << " " << value;
    }
  }
}

TEST_F(MergeStates, RowsPastTheLastSequenceAndOfSkippedOnesAreNotTouched) {
  MergeCase c{.tokens = 10, .sinks = fp32};
  c.query_start = {0, 1, 1, 4, 5, 8};
  std::vector<bool> written(10, true);
  written[8] = written[9] = false;
  expect_right(c, written);
  c.skip_decode = true;
  written[0] = written[4] = false;
  expect_right(c, written);
  c.dtype = e4m3;
  c.scale = 1.0f;
  expect_right(c, written);
}

TEST_F(MergeStates, AMapOfRowsComesBeforeTheBatch) {
  MergeCase c{.tokens = 4};
  c.query_start = {0, 1};
  c.rows = {3, -1, 0, 2};
  expect_right(c, {true, false, true, true});
}

}  // namespace longspan::tests
