// Backward on a GPU against float64: every family of kernels, over types, head dims, masks, groups,
// layouts, biases; and its bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tests/gpu/gpu_case.hpp"
#include "tests/gpu/on_gpu.hpp"
#include "tests/support/device_gradients.hpp"

namespace longspan::tests {
namespace {

class GpuGradients : public OnDevice {
 protected:
  void expect_exact(const GradientCase& c) {
    const auto seed = static_cast<std::uint32_t>(random_());
    SCOPED_TRACE("seed " + std::to_string(seed));
    const DeviceGradients problem(c, seed);
    EXPECT_TRUE(
        is_close(c, problem.run(backend()), problem.plain<double>(), problem.plain<float>()));
  }

  /// A NaN is in row 50's dout, and in key 90, of a case with one head, 100 rows and 150 keys.
  void expect_nan_where_seen(const GradientCase& c) {
    SCOPED_TRACE(std::string(name(c.dtype)) + " " + std::to_string(c.dim));
    DeviceGradients of_row(c, fresh_seed());
    of_row.poison_row(50);
    const Gradients rows = of_row.run(backend());
    const auto count = [](const std::vector<double>& all, std::int64_t row, int columns) {
      const auto first = all.begin() + row * columns;
      return std::count_if(first, first + columns, [](double x) { return std::isnan(x); });
    };
    for (std::int64_t j = 0; j < 150; ++j) {
      ASSERT_EQ(count(rows.dk, j, c.dim), of_row.sees(50, j) ? c.dim : 0) << j;
      ASSERT_EQ(count(rows.dv, j, c.values()), of_row.sees(50, j) ? c.values() : 0) << j;
    }
    for (std::int64_t t = 0; t < 100; ++t)
      ASSERT_EQ(count(rows.dq, t, c.dim), t == 50 ? c.dim : 0) << t;
    DeviceGradients of_key(c, fresh_seed());
    of_key.poison_key(90);
    const Gradients keys = of_key.run(backend());
    for (std::int64_t t = 0; t < 100; ++t)
      ASSERT_EQ(count(keys.dq, t, c.dim), of_key.sees(t, 90) ? c.dim : 0) << t;
    for (std::int64_t j = 0; j < 150; ++j) {
      bool with_key = false;  // whether a row sees both
      for (std::int64_t t = 0; t < 100; ++t)
        with_key = with_key || (of_key.sees(t, 90) && of_key.sees(t, j));
      ASSERT_EQ(count(keys.dk, j, c.dim), with_key ? c.dim : 0) << j;
    }
  }
};

/// Cases that differ in one feature from each other, of one type and head.
std::vector<GradientCase> features(const GradientCase& of) {
  std::vector<GradientCase> all;
  const auto with = [&](const auto& change) {
    GradientCase c = of;
    change(c);
    all.push_back(c);
  };
  with([](GradientCase&) {});
  with([](GradientCase& c) { c.mask.causal = true; });
  with([](GradientCase& c) { c.mask = {.causal = true, .window = 40}; });
  with([](GradientCase& c) { c.mask = {.window = 30, .right = 20}; });
  with([](GradientCase& c) {
    c.mask = {.causal = true, .alignment = Alignment::upper_left};
    c.query_len = {100};
    c.kv_len = {70};
  });
  with([](GradientCase& c) {
    c.heads = 6;
    c.kv_heads = 2;
    c.query_len = {33};
    c.mask.causal = true;
  });
  with([](GradientCase& c) {
    c.heads = 3;
    c.query_len = {1, 0, 70, 20};
    c.kv_len = {150, 30, 70, 0};
    c.causal = {1, 0, 1, 1};
  });
  with([](GradientCase& c) {
    c.query_len = {60, 40};
    c.kv_len = {90, 130};
    c.left_padding = {20, 0};
    c.used_rows = {50, 40};
    c.mask.causal = true;
    c.padded = true;
  });
  with([](GradientCase& c) {
    c.query_len = c.kv_len = {130};
    c.documents = {3, 50, 50, 111};
    c.mask.causal = true;
  });
  with([](GradientCase& c) { c.mask = {.causal = true, .chunk = 40, .lookback = 1}; });
  with([](GradientCase& c) {
    c.query_len = {60, 40};
    c.kv_len = {90, 130};
    c.bidirectional = {35, 70, 80, 90, 95, 96, 100, 130};
    c.mask = {.causal = true, .window = 30, .clamp_ranges = true};
  });
  with([](GradientCase& c) {
    c.query_len = {60, 40};
    c.kv_len = {90, 130};
    c.prefix = {20, 55};
    c.bidirectional = {35, 70, 80, 90, 95, 96, 100, 130};
    c.mask = {.causal = true, .window = 30, .prefix = 70};
    c.alibi = Alibi::query;
  });
  with([](GradientCase& c) {
    c.softcap = 1.5f;
    c.mask.causal = true;
  });
  with([](GradientCase& c) {
    c.alibi = Alibi::query;
    c.mask.causal = true;
  });
  with([](GradientCase& c) { c.dropout = 0.3; });
  with([](GradientCase& c) {
    c.dropout = 0.6;
    c.mask = {.causal = true, .alignment = Alignment::upper_left};
    c.softcap = 2;
    c.heads = 4;
    c.kv_heads = 2;
    c.query_len = {60, 40};
    c.kv_len = {50, 130};
  });
  with([](GradientCase& c) {
    c.alibi = Alibi::sqrt;
    c.slopes_of_sequences = true;
    c.query_len = {30, 50};
    c.kv_len = {60, 50};
    c.softcap = 2;
  });
  for (const Layout layout :
       {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved, Layout::listed})
    with([&](GradientCase& c) {
      c.mask = {.causal = true, .window = 90};
      c.dropout = layout == Layout::contiguous ? 0 : 0.2;
      c.query_len = {90};
      c.kv_len = {300};
      c.keys = {layout, 32};
      c.key_ranks = 2;
      if (layout == Layout::listed) return;
      c.rows = {layout, 16};
      c.row_ranks = 2;
    });
  return all;
}

/// NaN in the gradient of a row's result reaches only the keys that the row sees, and NaN in a key
/// only the rows that see it.
TEST_F(GpuGradients, NaNStaysWhereItIsSeen) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
    for (const bool tf32 : {false, true}) {
      if (tf32 && dtype != DType::fp32) continue;
      for (const float softcap : {0.0f, 2.0f})
        expect_nan_where_seen({.dtype = dtype,
                               .heads = 1,
                               .query_len = {100},
                               .kv_len = {150},
                               .mask = {.causal = true, .window = 30},
                               .softcap = softcap,
                               .tf32 = tf32});
    }
  for (const int value_dim : {128, 256})
    expect_nan_where_seen({.dtype = DType::bf16,
                           .heads = 1,
                           .dim = value_dim == 128 ? 192 : 256,
                           .value_dim = value_dim,
                           .query_len = {100},
                           .kv_len = {150},
                           .mask = {.causal = true, .window = 30}});
}

TEST_F(GpuGradients, OfQqBias) {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    GradientCase c{.dtype = dtype, .query_len = {70}, .kv_len = {90}, .qq = true};
    expect_exact(c);
    c.mask.causal = true;
    c.softcap = 2;
    c.alibi = Alibi::context;
    expect_exact(c);
    c.dropout = 0.4;
    c.heads = 4;
    c.kv_heads = 2;
    c.query_len = {30, 0, 70, 5};
    c.kv_len = {60, 20, 70, 5};
    expect_exact(c);
    c.mask.causal = false;
    c.keys = c.rows = {Layout::striped};
    c.key_ranks = 2;
    c.row_ranks = 3;
    expect_exact(c);
    GradientCase listed{.dtype = dtype, .query_len = {40}, .kv_len = {90}, .qq = true};
    listed.keys.layout = Layout::listed;
    listed.key_ranks = 2;
    expect_exact(listed);
  }
}

/// Two ranks' sums are the halves of the tree's last fold, in either way to cut.
TEST_F(GpuGradients, InTheFixedOrder) {
  for (const GradientCase& c : features({.dtype = DType::fp16, .heads = 1, .invariant = true})) {
    if (c.mask.sees_prefix_apart())  // two passes have no order
      EXPECT_THROW(DeviceGradients(c, 1).run(backend()), Unsupported);
    else
      expect_exact(c);
  }
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
    GradientCase c{.dtype = dtype,
                   .heads = 1,
                   .query_len = {200, 0, 140},
                   .kv_len = {200, 130, 300},
                   .mask = {.causal = true},
                   .invariant = true};
    expect_exact(c);
    const auto seed = static_cast<std::uint32_t>(random_());
    const Gradients whole = DeviceGradients(c, seed).run(backend());
    EXPECT_TRUE(whole == DeviceGradients(c, seed).run(backend())) << "a second time";
    for (const Layout layout : {Layout::contiguous, Layout::interleaved}) {
      GradientCase cut = c;
      cut.keys = cut.rows = {layout};
      const Gradients one = DeviceGradients(cut, seed).run(backend());
      cut.key_ranks = 2;
      EXPECT_TRUE(one == DeviceGradients(cut, seed).run(backend())) << name(layout) << ", keys";
      cut.key_ranks = 1;
      cut.row_ranks = 2;
      EXPECT_TRUE(one == DeviceGradients(cut, seed).run(backend())) << name(layout) << ", rows";
    }
  }
}

TEST_F(GpuGradients, OfFp32) {
  for (const GradientCase& c : features({})) expect_exact(c);
}

TEST_F(GpuGradients, OfTf32) {
  for (const GradientCase& c : features({.tf32 = true})) expect_exact(c);
  for (const int dim : {1, 8, 40, 100, 128, 203})
    expect_exact({.dim = dim,
                  .query_len = {40},
                  .kv_len = {100},
                  .mask = {.causal = true},
                  .tf32 = true,
                  .gap = dim % 8});
  expect_exact({.dout_dtype = DType::bf16, .dim = 70, .value_dim = 24, .tf32 = true});
}

TEST_F(GpuGradients, Of16Bits) {
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const GradientCase& c : features({.dtype = dtype})) expect_exact(c);
}

/// Heads above 128 have kernels of their own on Hopper, for what they serve.
TEST_F(GpuGradients, OfWideHeads) {
  for (const auto& [dim, value_dim] : {std::pair{192, 128}, {256, 256}})
    for (GradientCase c :
         features({.dtype = DType::bf16, .heads = 1, .dim = dim, .value_dim = value_dim})) {
      if (c.softcap > 0 || c.alibi || c.keys.layout == Layout::listed ||
          (c.dropout > 0 && c.key_ranks == 1))
        continue;
      c.dropout = 0;
      expect_exact(c);
    }
  for (const auto& [dim, value_dim] :
       {std::pair{136, 128}, {160, 40}, {192, 192}, {96, 200}, {248, 8}, {8, 256}})
    expect_exact(
        {.dtype = DType::bf16, .heads = 1, .dim = dim, .value_dim = value_dim, .query_len = {90}});
}

/// Several tiles of rows and of keys, in all widths of Hopper's kernels.
TEST_F(GpuGradients, OfManyTiles) {
  for (const int dim : {64, 128, 192, 256}) {
    const GradientCase c{.dtype = DType::bf16,
                         .heads = dim > 128 ? 2 : 4,
                         .kv_heads = dim > 128 ? 1 : 2,
                         .dim = dim,
                         .value_dim = dim == 192 ? 128 : dim,
                         .query_len = {230},
                         .kv_len = {300},
                         .mask = {.causal = true}};
    expect_exact(c);
    if (dim == 64 || dim == 256) continue;
    GradientCase other = c;
    other.value_dim = 96;
    other.mask = {.window = 100, .right = 30};
    expect_exact(other);
    other = c;
    other.keys = {Layout::zigzag};
    other.rows = {Layout::zigzag};
    other.key_ranks = other.row_ranks = 2;
    expect_exact(other);
    other = c;
    other.query_len = {150, 1, 0, 130};
    other.kv_len = {200, 140, 20, 130};
    other.padded = true;
    expect_exact(other);
  }
}

/// Gradients that the kernels store are their sums, rounded once, and nothing else is written.
TEST_F(GpuGradients, StoredByTheKernels) {
  LONGSPAN_NEEDS_HOPPER();
  for (const auto& [dim, value_dim] :
       {std::pair{64, 64}, {40, 48}, {128, 104}, {136, 128}, {248, 256}}) {
    GradientCase c{.dtype = dim == 40 ? DType::fp16 : DType::bf16,
                   .heads = 4,
                   .kv_heads = 2,
                   .dim = dim,
                   .value_dim = value_dim,
                   .query_len = {100, 0, 70, 20},
                   .kv_len = {200, 30, 40, 0},
                   .mask = {.causal = true},
                   .dropout = dim == 40 || dim == 128 ? 0.2 : 0};
    for (const bool several : {true, false}) {
      if (!several) c.query_len = {110}, c.kv_len = {300};
      const auto seed = static_cast<std::uint32_t>(random_());
      SCOPED_TRACE("seed " + std::to_string(seed) + ", dim " + std::to_string(dim));
      const DeviceGradients problem(c, seed);
      Gradients sums = problem.run(backend());
      for (std::vector<double>* const gradients : {&sums.dq, &sums.dk, &sums.dv})
        for (double& x : *gradients) x = launcher::rounded(c.dtype, static_cast<float>(x));
      EXPECT_TRUE(problem.run(backend(), true) == sums);
    }
  }
}

/// Softcap, ALiBi and dropout of several tiles: keys at equal steps or not, on one side of the rows
/// or on both, and products that a cap reaches in each of its forms.
TEST_F(GpuGradients, OfScoresOfManyTiles) {
  GradientCase c{.dtype = DType::bf16,
                 .heads = 1,
                 .dim = 128,
                 .query_len = {150},
                 .kv_len = {230},
                 .mask = {.causal = true}};
  const auto expect_also = [&](const auto& change) {
    GradientCase changed = c;
    change(changed);
    expect_exact(changed);
    c.dim = 192 - c.dim;
    c.dtype = c.dtype == DType::bf16 ? DType::fp16 : DType::bf16;
  };
  for (const float softcap : {0.5f, 4.0f, 100.0f}) {
    expect_also([&](GradientCase& of) { of.softcap = softcap; });
    expect_also([&](GradientCase& of) { of.softcap = softcap, of.mask = {}; });
  }
  for (const Alibi alibi : {Alibi::context, Alibi::query, Alibi::query}) {
    c.alibi = alibi;
    expect_also([&](GradientCase&) {});
    c.mask = {.window = 100, .right = 90};
    expect_also([&](GradientCase& of) { of.keys = {Layout::striped}, of.key_ranks = 2; });
    expect_also([&](GradientCase& of) {
      of.softcap = 3;
      of.keys = {Layout::interleaved, 48};
      of.key_ranks = 2;
      of.query_len = {130, 60};
      of.kv_len = {150, 130};
    });
  }
  c.alibi = {};
  c.dropout = 0.4;
  c.kv_len = {233};  // its tiles begin anywhere
  for (int i = 0; i < 2; ++i) expect_also([](GradientCase&) {});
  for (int i = 0; i < 2; ++i)
    expect_also([](GradientCase& of) {
      of.keys = of.rows = {Layout::zigzag};
      of.key_ranks = of.row_ranks = 2;
    });
}

/// Gradients that fp16 holds, but not their products with weights.
TEST_F(GpuGradients, OfAnyScale) {
  for (const int power : {-12, 12})
    for (const int dim : {32, 64, 128})
      expect_exact({.dtype = DType::fp16,
                    .heads = 1,
                    .dim = dim,
                    .query_len = {200},
                    .kv_len = {260},
                    .dout_power = power});
}

TEST_F(GpuGradients, Of16BitsAndAnyHead) {
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const int dim : {1, 8, 40, 100, 128, 203, 256, 300})
      expect_exact({.dtype = dtype,
                    .dim = dim,
                    .query_len = {40},
                    .kv_len = {100},
                    .mask = {.causal = true},
                    .gap = dim % 8});
  expect_exact({.dtype = DType::bf16, .dim = 192, .value_dim = 128, .query_len = {40}});
  expect_exact({.dtype = DType::fp16, .dim = 24, .value_dim = 70, .query_len = {40}});
  expect_exact({.dtype = DType::bf16, .dout_dtype = DType::fp32, .query_len = {40}});
  expect_exact({.dtype = DType::bf16, .dout_dtype = DType::fp16, .query_len = {40}});
}

TEST_F(GpuGradients, OfAnyHead) {
  for (const int dim : {1, 8, 40, 100, 128, 203, 256, 576})
    expect_exact({.dim = dim,
                  .value_dim = std::min(dim, 512),
                  .query_len = {20},
                  .kv_len = {80},
                  .mask = {.causal = true}});
  expect_exact({.dim = 48, .value_dim = 130, .query_len = {20}, .kv_len = {80}});
  expect_exact({.dim = 130, .value_dim = 16, .query_len = {20}, .kv_len = {80}, .gap = 3});
}
}  // namespace
}  // namespace longspan::tests
