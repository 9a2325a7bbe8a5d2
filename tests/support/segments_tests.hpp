// States per segment, exported and turned into results, on every device: against float64, with
// everything poisoned that must not be read or written.
#pragma once

#include "tests/support/on_device.hpp"

namespace longspan::tests {

struct SegmentsCase {
  std::vector<std::int32_t> query_len = {1, 3, 2}, kv_len = {300, 40, 1000};
  int heads = 3, dim = 64, padded_dim = 64, segments = 4;
  std::int64_t keys = 0;
  int tile = 16;
  Shard shard = {};
  std::optional<DType> sinks = {};
  bool skip_decode = false;
  int rows_past = 2;  // rows of the tensors past the last sequence
  DType out = DType::fp32;
  std::optional<float> scale = {};
  int gap = 0;

  std::int64_t tokens() const {
    std::int64_t sum = rows_past;
    for (std::int32_t n : query_len) sum += n;
    return sum;
  }
  std::int64_t rows() const { return tokens() * heads; }
  /// The sequence of a token; -1: none, or skipped.
  int sequence(std::int64_t token) const {
    for (int b = 0; b < static_cast<int>(query_len.size()); ++b) {
      if (token < query_len[b]) return skip_decode && query_len[b] == 1 ? -1 : b;
      token -= query_len[b];
    }
    return -1;
  }
  /// Whether a segment of a row has keys, by the definition: each has ceil(len / (segments * tile))
  /// tiles, or `keys` keys.
  bool holds_keys(std::int64_t token, int segment) const {
    const int b = sequence(token);
    if (b < 0) return false;
    const std::int64_t len = shard.local_len(kv_len[b]);
    const std::int64_t tiles = (len + segments * tile - 1) / (segments * tile);
    return segment * (keys > 0 ? keys : tiles * tile) < len;
  }
  bool is_there(std::int64_t token, int segment) const {
    return sequence(token) >= 0 && (segment == 0 || holds_keys(token, segment));
  }
};

class Segments : public OnDevice {
 protected:
  /// States and sinks of a case, and the kernels' results.
  struct Run {
    std::vector<std::byte> memory;
    kernels::StateSlots states;
    std::vector<float> sinks;
    std::vector<float> output, max, expsum;
    std::vector<std::byte> out;
    std::vector<float> lse;
  };

  /// States of the existing segments, one in four empty with a NaN payload; NaN elsewhere.
  void make(const SegmentsCase& c, Run& run) {
    const std::int64_t rows = c.rows();
    run.memory.assign(kernels::StateSlots::bytes(rows, c.dim) * c.segments, std::byte{0xff});
    run.states = {run.memory.data(), rows, c.dim, c.segments};
    for (int s = 0; s < c.segments; ++s)
      for (std::int64_t row = 0; row < rows; ++row) {
        if (!c.is_there(row / c.heads, s)) continue;
        const bool empty = !c.holds_keys(row / c.heads, s) || below(4) == 0;
        run.states.stats(s)[row] =
            empty ? Stats{kNaN, 0.0f} : Stats{5 * normal(), 1 + std::abs(normal())};
        for (int d = 0; d < c.dim && !empty; ++d) run.states.o(s, row)[d] = normal();
      }
    for (int h = 0; h < c.heads; ++h) run.sinks.push_back(rounded_sink(c, 2 * normal()));
  }

  static float rounded_sink(const SegmentsCase& c, float value) {
    std::array<std::byte, 4> bytes{};
    store_element(bytes.data(), c.sinks.value_or(fp32), 0, value);
    return load_element(bytes.data(), c.sinks.value_or(fp32), 0);
  }

  struct Inputs {
    DeviceArray<std::int32_t> query_start, kv_len;
    kernels::Batch batch;
  };
  Inputs inputs(const SegmentsCase& c) const {
    std::vector<std::int32_t> starts{0};
    for (std::int32_t n : c.query_len) starts.push_back(starts.back() + n);
    Inputs in{on_device(starts), on_device(c.kv_len), {}};
    in.batch.size = static_cast<int>(c.kv_len.size());
    in.batch.query_start = in.query_start.data();
    in.batch.kv_len = in.kv_len.data();
    in.batch.skip_decode = c.skip_decode;
    return in;
  }

  void export_states(const SegmentsCase& c, Run& run) const {
    const Inputs in = inputs(c);
    const auto memory = on_device(run.memory);
    std::vector<std::byte> sinks(c.heads * sizeof(float));
    for (int h = 0; h < c.heads; ++h)
      store_element(sinks.data(), c.sinks.value_or(fp32), h, run.sinks[h]);
    const auto device_sinks = on_device(sinks);
    const std::size_t count = c.rows() * c.segments;
    const auto output = poisoned<float>(count * c.padded_dim);
    const auto max = poisoned<float>(count), expsum = poisoned<float>(count);
    kernels::ExportSegmentsParams p;
    p.states = run.states;
    p.states.data = memory.data();
    p.parts = {c.segments, c.keys, c.tile};
    p.batch = in.batch;
    p.shard = c.shard;
    p.tokens = c.tokens();
    p.heads = c.heads;
    if (c.sinks) p.sinks = {device_sinks.data(), *c.sinks};
    p.to = {output.data(), max.data(), expsum.data(), c.segments, c.padded_dim};
    backend().export_segments(p, {});
    run.output = output.values();
    run.max = max.values();
    run.expsum = expsum.values();
  }

  std::int64_t row_stride(const SegmentsCase& c) const {
    return std::int64_t{c.heads} * c.dim + c.gap;
  }

  void reduce(const SegmentsCase& c, Run& run) const {
    const Inputs in = inputs(c);
    const auto output = on_device(run.output), max = on_device(run.max),
               expsum = on_device(run.expsum);
    const auto out = poisoned<std::byte>(c.tokens() * row_stride(c) * size_of(c.out));
    const auto lse = poisoned<float>(c.rows());
    const auto scale = on_device(std::vector<float>{c.scale.value_or(1.0f)});
    kernels::ReduceSegmentsParams p;
    p.from = {output.data(), max.data(), expsum.data(), c.segments, c.padded_dim};
    p.parts = {c.segments, c.keys, c.tile};
    p.batch = in.batch;
    p.shard = c.shard;
    p.tokens = c.tokens();
    p.heads = c.heads;
    p.dim = c.dim;
    p.dtype = c.out;
    if (c.scale) p.out_scale = {scale.data(), false};
    p.out = {out.data(), row_stride(c), c.dim};
    p.lse = {lse.data(), 1, c.tokens()};
    backend().reduce_segments(p, {});
    run.out = out.values();
    run.lse = lse.values();
  }

  /// Checks what the export wrote, and that it wrote nothing else.
  void expect_exported(const SegmentsCase& c, const Run& run) const {
    for (std::int64_t row = 0; row < c.rows(); ++row)
      for (int s = 0; s < c.segments; ++s) {
        const std::int64_t at = row * c.segments + s;
        SCOPED_TRACE(::testing::Message() << "row " << row << " segment " << s);
        const float* output = run.output.data() + at * c.padded_dim;
        if (!c.is_there(row / c.heads, s)) {
          ASSERT_TRUE(std::isnan(run.max[at]) && std::isnan(run.expsum[at]));
          for (int d = 0; d < c.padded_dim; ++d) ASSERT_TRUE(std::isnan(output[d]));
          continue;
        }
        const Stats stats = run.states.stats(s)[row];
        const bool empty = stats.sum == 0;
        const double sink = run.sinks[row % c.heads], own = double{stats.max} * std::log(2.0);
        const bool has_sink = s == 0 && c.sinks;
        if (empty && !has_sink) {
          ASSERT_EQ(run.max[at], -kInf);
          ASSERT_EQ(run.expsum[at], 0.0f);
          for (int d = 0; d < c.dim; ++d) ASSERT_EQ(output[d], 0.0f);
          continue;
        }
        const double top = empty ? sink : has_sink ? std::max(own, sink) : own;
        const double sum =
            (empty ? 0 : stats.sum * std::exp(own - top)) + (has_sink ? std::exp(sink - top) : 0);
        ASSERT_NEAR(run.max[at], top, 1e-6 * (1 + std::abs(top)));
        ASSERT_NEAR(run.expsum[at], sum, 1e-5 * sum);
        for (int d = 0; d < c.dim; ++d) {
          const double o = empty ? 0 : run.states.o(s, row)[d] * std::exp(own - top);
          ASSERT_NEAR(output[d], o, 1e-5 * (1e-3 + std::abs(o)));
        }
        for (int d = c.dim; d < c.padded_dim; ++d) ASSERT_TRUE(std::isnan(output[d]));
      }
  }

  /// out and lse from the states themselves; the sink counts once.
  void expect_reduced(const SegmentsCase& c, const Run& run) const {
    for (std::int64_t token = 0; token < c.tokens(); ++token)
      for (int h = 0; h < c.heads; ++h) {
        SCOPED_TRACE(::testing::Message() << "token " << token << " head " << h);
        const std::int64_t row = token * c.heads + h;
        const auto out = [&](int d) {
          return load_element(run.out.data(), c.out, token * row_stride(c) + h * c.dim + d);
        };
        const float lse = run.lse[h * c.tokens() + token];
        if (c.sequence(token) < 0) {
          ASSERT_TRUE(std::isnan(lse));
          for (int d = 0; d < c.dim; ++d) ASSERT_TRUE(std::isnan(out(d)));
          continue;
        }
        double sum = c.sinks ? std::exp(double{run.sinks[h]}) : 0;
        std::vector<double> o(c.dim), size(c.dim);
        for (int s = 0; s < c.segments; ++s) {
          if (!c.holds_keys(token, s)) continue;
          const Stats stats = run.states.stats(s)[row];
          if (stats.sum == 0) continue;
          sum += stats.sum * std::exp2(double{stats.max});
          for (int d = 0; d < c.dim; ++d) {
            o[d] += run.states.o(s, row)[d] * std::exp2(double{stats.max});
            size[d] += std::abs(run.states.o(s, row)[d]) * std::exp2(double{stats.max});
          }
        }
        if (sum == 0)
          ASSERT_EQ(lse, -kInf);
        else
          ASSERT_NEAR(lse, std::log(sum), 3e-6 * (1 + std::abs(std::log(sum))));
        for (int d = 0; d < c.dim; ++d) {
          const double expected = sum == 0 ? 0 : o[d] / sum / c.scale.value_or(1.0f);
          const double terms = sum == 0 ? 0 : size[d] / sum / c.scale.value_or(1.0f);
          ASSERT_NEAR(out(d), expected, one_rounding(c.out, expected, 8 * terms)) << d;
        }
      }
  }

  void expect_right(const SegmentsCase& c) {
    Run run;
    make(c, run);
    export_states(c, run);
    expect_exported(c, run);
    reduce(c, run);
    expect_reduced(c, run);
  }
};

TEST_F(Segments, ExportAndReduceOfAnyCut) {
  for (int segments : {1, 2, 3, 4, 16, 64, 200})
    for (std::int64_t keys : {0, 128})
      for (int tile : {1, 16, 32}) {
        SegmentsCase c;
        c.segments = segments;
        c.keys = keys;
        c.tile = tile;
        if (keys * segments < 1000 && keys > 0) continue;  // they would not hold all keys
        expect_right(c);
      }
}

TEST_F(Segments, AnyDimTypeAndPadding) {
  for (int dim : {1, 8, 12, 21, 24, 59, 64, 80, 128, 192, 256})
    for (DType out : {fp32, fp16, bf16, e4m3, e5m2})
      for (int padding : {0, 1, 32}) {
        SegmentsCase c;
        c.dim = dim;
        c.padded_dim = dim + padding;
        c.out = out;
        if (is_fp8(out)) c.scale = 0.05f;
        c.gap = padding;
        expect_right(c);
      }
}

TEST_F(Segments, TheSinkCountsOnce) {
  for (DType sinks : {fp32, fp16, bf16})
    for (int segments : {1, 4, 33}) {
      SegmentsCase c;
      c.sinks = sinks;
      c.segments = segments;
      expect_right(c);
    }
}

TEST_F(Segments, SegmentsPastTheEndAreNeitherWrittenNorRead) {
  // 40 keys in tiles of 16: three of 16 segments; the others hold NaN on both sides.
  SegmentsCase c;
  c.kv_len = {40, 1, 16};
  c.segments = 16;
  c.sinks = fp32;
  EXPECT_FALSE(c.is_there(0, 3));
  EXPECT_TRUE(c.is_there(0, 2));
  expect_right(c);
}

TEST_F(Segments, ASequenceWithoutKeysKeepsItsSink) {
  SegmentsCase c;
  c.kv_len = {0, 40, 0};
  expect_right(c);
  c.sinks = bf16;
  expect_right(c);
}

TEST_F(Segments, RowsOfSkippedSequencesAndPastTheLastAreNotTouched) {
  SegmentsCase c;
  c.query_len = {1, 0, 4, 1, 2};
  c.kv_len = {300, 5, 40, 7, 1000};
  c.skip_decode = true;
  expect_right(c);
}

TEST_F(Segments, AShardCutsItsOwnKeys) {
  for (const Shard& shard : {Shard::striped(0, 1, 3), Shard::interleaved(0, 0, 2, 16)}) {
    SegmentsCase c;
    c.shard = shard;
    expect_right(c);
  }
}

/// With max = 0 in such a segment, a row whose scores are all below -90 used to be lost.
TEST_F(Segments, AnEmptiedSegmentDoesNotReportMaxZero) {
  SegmentsCase c;
  c.segments = 2;
  Run run;
  make(c, run);
  for (std::int64_t row = 0; row < c.rows(); ++row) {
    if (!c.is_there(row / c.heads, 1)) continue;
    run.states.stats(0)[row] = {kNaN, 0.0f};
    run.states.stats(1)[row] = {-200.0f, 1.5f};
    for (int d = 0; d < c.dim; ++d) run.states.o(1, row)[d] = normal();
  }
  export_states(c, run);
  expect_exported(c, run);
  reduce(c, run);
  expect_reduced(c, run);
}

/// Other writers leave 0 or a finite value for -inf in a segment without keys.
TEST_F(Segments, AnEmptySegmentOfAnyMaxHidesNothing) {
  for (float stand_in : {0.0f, -10000.0f, kInf, -kInf, kNaN}) {
    SegmentsCase c;
    c.segments = 2;
    c.kv_len = {300, 40, 1000};
    Run run;
    make(c, run);
    for (std::int64_t row = 0; row < c.rows(); ++row) {
      if (!c.is_there(row / c.heads, 1)) continue;
      run.states.stats(0)[row] = {kNaN, 0.0f};
      run.states.stats(1)[row] = {-20000.0f, 1.5f};
      for (int d = 0; d < c.dim; ++d) run.states.o(1, row)[d] = normal();
    }
    export_states(c, run);
    for (std::int64_t row = 0; row < c.rows(); ++row) {
      if (!c.is_there(row / c.heads, 1)) continue;
      run.max[row * 2] = stand_in;
      std::fill_n(run.output.begin() + row * 2 * c.padded_dim, c.padded_dim, kNaN);
    }
    reduce(c, run);
    for (std::int64_t token = 0; token < c.tokens(); ++token)
      for (int h = 0; h < c.heads && c.is_there(token, 1); ++h) {
        const std::int64_t row = token * c.heads + h;
        for (int d = 0; d < c.dim; ++d)
          ASSERT_NEAR(load_element(run.out.data(), fp32, row * c.dim + d),
                      run.states.o(1, row)[d] / 1.5, 1e-6)
              << stand_in;
        ASSERT_NEAR(run.lse[h * c.tokens() + token], -20000 * std::log(2.0) + std::log(1.5), 0.01);
      }
  }
}

/// Engines write a max of -inf beside a sum of 1 where a window left a segment without keys, and
/// any output of such a segment. One segment is left: the first, the last or another.
TEST_F(Segments, AMaxOfMinusInfinityIsEmptyWhateverTheSum) {
  for (float sum : {1.0f, 0.5f, 0.0f, kNaN})
    for (int left : {0, 2, 3, -1})
      for (float payload : {0.0f, kNaN, kInf}) {
        SegmentsCase c;
        c.kv_len = {300, 256, 1000};
        Run run;
        make(c, run);
        export_states(c, run);
        for (std::int64_t row = 0; row < c.rows(); ++row)
          for (int s = 0; s < c.segments; ++s) {
            if (!c.is_there(row / c.heads, s)) continue;
            const std::int64_t at = row * c.segments + s;
            float* output = run.output.data() + at * c.padded_dim;
            run.max[at] = s == left ? normal() : -kInf;
            run.expsum[at] = s == left ? 2.0f : sum;
            for (int d = 0; d < c.dim; ++d) output[d] = s == left ? normal() : payload;
          }
        reduce(c, run);
        for (std::int64_t token = 0; token < c.tokens() - c.rows_past; ++token)
          for (int h = 0; h < c.heads; ++h) {
            const std::int64_t row = token * c.heads + h, at = row * c.segments + left;
            const bool some = left >= 0;
            const float lse = run.lse[h * c.tokens() + token];
            if (some)
              ASSERT_NEAR(lse, run.max[at] + std::log(2.0), 1e-6) << left;
            else
              ASSERT_EQ(lse, -kInf);
            for (int d = 0; d < c.dim; ++d)
              ASSERT_EQ(load_element(run.out.data(), fp32, row * c.dim + d),
                        some ? run.output[at * c.padded_dim + d] / 2 : 0.0f)
                  << "left " << left << " sum " << sum << " payload " << payload;
          }
      }
}

/// Engines pass maxima in natural units, some of them too large for base 2.
TEST_F(Segments, AFiniteMaxOfAnySizeStaysWhatItIs) {
  constexpr float kMost = std::numeric_limits<float>::max();
  const float sizes[] = {3e38f, -3e38f, 0.0f, kMost, -kMost, 2.5e38f, 3e38f, -2.5e38f};
  SegmentsCase c;
  c.kv_len = {300, 256, 1000};
  c.rows_past = 0;
  for (int round = 0; round < 8; ++round) {
    Run run;
    make(c, run);
    export_states(c, run);
    for (std::int64_t row = 0; row < c.rows(); ++row)
      for (int s = 0; s < c.segments; ++s) {
        const std::int64_t at = row * c.segments + s;
        run.max[at] = sizes[below(8)];
        run.expsum[at] = 1.0f + static_cast<float>(below(3));
        for (int d = 0; d < c.dim; ++d) run.output[at * c.padded_dim + d] = normal();
      }
    reduce(c, run);
    for (std::int64_t row = 0; row < c.rows(); ++row) {
      double top = -kInf, sum = 0;
      std::vector<double> o(c.dim);
      for (int s = 0; s < c.segments; ++s)
        top = std::max<double>(top, run.max[row * c.segments + s]);
      for (int s = 0; s < c.segments; ++s) {
        const std::int64_t at = row * c.segments + s;
        const double weight = std::exp(run.max[at] - top);
        sum += weight * run.expsum[at];
        for (int d = 0; d < c.dim; ++d) o[d] += weight * run.output[at * c.padded_dim + d];
      }
      const float lse = run.lse[row % c.heads * c.tokens() + row / c.heads];
      ASSERT_NEAR(lse, top + std::log(sum), 1e-6 * (1 + std::abs(top))) << row;
      for (int d = 0; d < c.dim; ++d)
        ASSERT_NEAR(load_element(run.out.data(), fp32, row * c.dim + d), o[d] / sum,
                    1e-6 * (1 + std::abs(o[d])))
            << row;
    }
  }
}

TEST_F(Segments, NanInASegmentStaysNan) {
  SegmentsCase c;
  Run run;
  make(c, run);
  run.states.stats(0)[4] = {kNaN, 1.0f};
  export_states(c, run);
  reduce(c, run);
  for (std::int64_t row = 0; row < (c.tokens() - c.rows_past) * c.heads; ++row)
    for (int d = 0; d < c.dim; ++d)
      ASSERT_EQ(std::isnan(load_element(run.out.data(), fp32, row * c.dim + d)), row == 4) << row;
}

TEST_F(Segments, ContextsAreCutWhereTheNewKeysBegin) {
  for (int batch : {1, 3, 300}) {
    std::vector<std::int32_t> starts{0}, kv_len;
    for (int b = 0; b < batch; ++b) {
      starts.push_back(starts.back() + static_cast<std::int32_t>(below(20)));
      kv_len.push_back(static_cast<std::int32_t>(below(60)));
    }
    const auto query_start = on_device(starts), lengths = on_device(kv_len);
    const auto ranges = poisoned<std::int64_t>(batch * 3);
    kernels::ContextCutParams p;
    p.batch.size = batch;
    p.batch.query_start = query_start.data();
    p.batch.kv_len = lengths.data();
    p.tokens = starts.back();
    p.ranges = ranges.data();
    backend().cut_context(p, {});
    const std::vector<std::int64_t> got = ranges.values();
    for (int b = 0; b < batch; ++b) {
      EXPECT_EQ(got[3 * b], 0);
      EXPECT_EQ(got[3 * b + 1], std::max(0, kv_len[b] - (starts[b + 1] - starts[b])));
      EXPECT_EQ(got[3 * b + 2], kv_len[b]);
    }
  }
}

}  // namespace longspan::tests
