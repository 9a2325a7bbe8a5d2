// The kernels around the gradients of an attention, beside those of the host: the same bits, but
// for sums of fp64 and rotations. Lengths lie on the device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/backend.hpp"
#include "tests/gpu/on_gpu.hpp"
#include "tests/gpu/serving_ranks.hpp"

namespace longspan::tests {
namespace {

using kernels::GradientSums;
using kernels::RowTerm;
using kernels::TokenLse;
using kernels::TokenRows;

/// An array in memory of the host, and a copy of it on the device.
template <class T>
class Both {
 public:
  Both() = default;
  explicit Both(std::vector<T> values)
      : host_(std::move(values)), device_(on_device(Device::cuda, host_)) {}
  T* on(Device device) {
    return device == Device::host ? host_.data() : static_cast<T*>(device_.data());
  }
  std::vector<T> found(Device device) const {
    return device == Device::host ? host_ : on_host<T>(device_, host_.size());
  }
  std::size_t size() const { return host_.size(); }

 private:
  std::vector<T> host_;
  Buffer device_;
};

constexpr Device kDevices[] = {Device::host, Device::cuda};
constexpr std::byte kPoison{0xff};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class GradientKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_) GTEST_SKIP() << "no GPU";
  }
  const kernels::Backend& on(Device device) const {
    return device == Device::host ? *host_ : *cuda_;
  }
  std::vector<float> floats(std::size_t count) {
    std::normal_distribution<float> of_order_1;
    std::vector<float> values(count);
    for (float& value : values) value = of_order_1(random_);
    return values;
  }
  /// Random elements of a type.
  std::vector<std::byte> elements(DType dtype, std::size_t count) {
    std::vector<std::byte> bytes(count * size_of(dtype));
    const std::vector<float> values = floats(count);
    for (std::size_t i = 0; i < count; ++i)
      store_element(bytes.data(), dtype, static_cast<std::int64_t>(i), values[i]);
    return bytes;
  }
  template <class T>
  static std::string bits(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
  }

  std::mt19937 random_{fresh_seed()};

 private:
  std::unique_ptr<kernels::Backend> host_ = kernels::host_backend(1), cuda_ = make_backend();
};

/// Rows that see nothing have NaN in dout.
TEST_F(GradientKernels, TermsOfRows) {
  for (const auto& [out_dtype, dout_dtype, dim, gap] : {std::tuple{fp32, fp32, 70, 5},
                                                        {bf16, fp32, 32, 5},
                                                        {bf16, bf16, 8, 5},
                                                        {bf16, bf16, 72, 8},
                                                        {fp16, fp16, 136, 8},
                                                        {fp16, fp16, 130, 5}}) {
    SCOPED_TRACE(std::string(name(out_dtype)) + " " + name(dout_dtype) + " " + std::to_string(dim));
    constexpr std::int64_t kTokens = 67;
    constexpr int kHeads = 3;
    const std::int64_t row = std::int64_t{kHeads} * (dim + gap);  // rows with gaps
    std::vector<std::byte> given = elements(dout_dtype, kTokens * row);
    std::vector<float> of_lse = floats(kTokens * kHeads);
    for (std::int64_t i = 0; i < std::ssize(of_lse); i += 7) {
      of_lse[i] = -std::numeric_limits<float>::infinity();
      std::fill_n(given.begin() + (i / kHeads * row + i % kHeads * (dim + gap)) *
                                      static_cast<std::int64_t>(size_of(dout_dtype)),
                  dim * size_of(dout_dtype), kPoison);
    }
    Both out(elements(out_dtype, kTokens * row)), dout(given);
    Both lse(of_lse), dlse(floats(kTokens * kHeads));
    Both terms(std::vector<RowTerm>(kTokens * kHeads));
    for (const bool with_dlse : {true, false}) {
      for (const Device device : kDevices)
        on(device).row_terms({.out_dtype = out_dtype,
                              .dout_dtype = dout_dtype,
                              .tokens = kTokens,
                              .heads = kHeads,
                              .value_dim = dim,
                              .out = TokenRows(out.on(device), row, dim + gap),
                              .dout = TokenRows(dout.on(device), row, dim + gap),
                              .lse = TokenLse(lse.on(device), kHeads, 1),
                              .dlse = with_dlse ? TokenLse(dlse.on(device), kHeads, 1) : TokenLse(),
                              .terms = terms.on(device)},
                             {});
      const auto found = terms.found(Device::cuda), wanted = terms.found(Device::host);
      for (std::size_t i = 0; i < found.size(); ++i) {
        ASSERT_EQ(found[i].lse, wanted[i].lse);
        ASSERT_EQ(found[i].lse_low, wanted[i].lse_low);
        ASSERT_EQ(found[i].d, wanted[i].d) << i;  // a chain of fmas in one order
      }
    }
  }
}

/// In the fixed order two ranks fold to the bits of one.
TEST_F(GradientKernels, GradientsOfSinks) {
  constexpr int kHeads = 5;
  const std::vector<std::int32_t> starts{0, 300, 300, 977};  // rows of three sequences
  constexpr std::int64_t kTokens = 980;
  std::vector<RowTerm> of_rows(kTokens * kHeads);
  const std::vector<float> values = floats(2 * of_rows.size());
  for (std::size_t i = 0; i < of_rows.size(); ++i)
    of_rows[i] = i % 9 == 0 ? RowTerm{-std::numeric_limits<float>::infinity(), 0, kNan}
                            : RowTerm{values[2 * i], values[2 * i] * 0x1p-25f, values[2 * i + 1]};
  const auto sums_of = [&](std::vector<RowTerm> rows, const std::vector<std::int32_t>& own,
                           const Shard& queries, bool invariant) {
    Both sinks(
        std::vector<float>{0.5f, -1.0f, 2.0f, 0.0f, -std::numeric_limits<float>::infinity()});
    Both start(own), whole(starts);
    const std::int64_t tokens = std::ssize(rows) / kHeads;
    Both terms(std::move(rows));
    Both to(std::vector<float>(kHeads, kNan));
    for (const Device device : kDevices) {
      kernels::SinkGradientParams p;
      p.batch.size = 3;
      p.batch.query_start = start.on(device);
      p.batch.whole_query_start = whole.on(device);
      p.queries = queries;
      p.tokens = tokens;
      p.heads = kHeads;
      p.invariant = invariant;
      p.sinks = sinks.on(device);
      p.terms = terms.on(device);
      p.to = to.on(device);
      on(device).sink_gradients(p, {});
    }
    const std::vector<float> found = to.found(Device::cuda), wanted = to.found(Device::host);
    for (int h = 0; h < kHeads; ++h)
      EXPECT_NEAR(found[h], wanted[h], 1e-5f * static_cast<float>(kTokens)) << h;
    EXPECT_EQ(found[kHeads - 1], 0.0f);
    EXPECT_NE(found[0], 0.0f);
    return found;
  };
  sums_of(of_rows, starts, Shard::contiguous(0, 0, 1), false);
  for (const Layout layout : {Layout::contiguous, Layout::interleaved}) {
    SCOPED_TRACE(name(layout));
    const auto share = [&](int rank, int ranks) { return Shard{layout, rank, ranks}; };
    const std::vector<float> all = sums_of(of_rows, starts, share(0, 1), true);
    std::vector<std::vector<float>> parts;
    for (int rank = 0; rank < 2; ++rank) {
      const Shard own = share(rank, 2);
      std::vector<RowTerm> rows;
      std::vector<std::int32_t> start{0};
      for (int b = 0; b < 3; ++b) {
        const std::int64_t length = starts[b + 1] - starts[b];
        for (std::int64_t t = 0; t < own.local_len(length); ++t) {
          const std::int64_t token = starts[b] + own.position(t, length);
          rows.insert(rows.end(), of_rows.begin() + token * kHeads,
                      of_rows.begin() + (token + 1) * kHeads);
        }
        start.push_back(static_cast<std::int32_t>(std::ssize(rows) / kHeads));
      }
      parts.push_back(sums_of(rows, start, own, true));
    }
    for (int h = 0; h < kHeads; ++h) EXPECT_EQ(parts[0][h] + parts[1][h], all[h]) << h;
  }
}

TEST_F(GradientKernels, WidenedGradientsOfResults) {
  for (const DType dtype : {fp32, bf16, fp16}) {
    constexpr std::int64_t kTokens = 21;
    constexpr int kHeads = 3, kDim = 37;
    Both dout(elements(dtype, kTokens * kHeads * 40));
    Both dlse(floats(kTokens * kHeads));
    Both to(std::vector<float>(kTokens * kHeads * kDim + 16, kNan));
    Both to_lse(std::vector<float>(kTokens * kHeads + 16, kNan));
    for (const bool with_dlse : {true, false}) {
      for (const Device device : kDevices)
        on(device).widen_gradients(
            {.dtype = dtype,
             .tokens = kTokens,
             .heads = kHeads,
             .value_dim = kDim,
             .dout = TokenRows(dout.on(device), kHeads * 40, 40),
             .dlse = with_dlse ? TokenLse(dlse.on(device), kHeads, 1) : TokenLse(),
             .to = to.on(device),
             .to_lse = to_lse.on(device)},
            {});
      EXPECT_EQ(bits(to.found(Device::cuda)), bits(to.found(Device::host)));
      EXPECT_EQ(bits(to_lse.found(Device::cuda)), bits(to_lse.found(Device::host)));
    }
  }
}

TEST_F(GradientKernels, SumsAreClearedAndAdded) {
  constexpr std::int64_t kCount = 16 * 77;
  Both to(floats(kCount + 16)), from(floats(kCount + 16));
  for (const Device device : kDevices) {
    on(device).clear_sums(to.on(device), 16, {});
    on(device).add_sums(to.on(device), from.on(device), kCount, {});
  }
  EXPECT_EQ(to.found(Device::cuda), to.found(Device::host));
  EXPECT_EQ(to.found(Device::cuda)[3], from.found(Device::host)[3]);
}

/// Keys of three sequences, one of them empty, on each of two ranks; the sums have room for more.
struct Keys {
  std::vector<std::int32_t> lengths{150, 0, 70};
  std::vector<std::int64_t> starts;
  std::int64_t count = 0;
  Shard shard;

  explicit Keys(Layout layout, int rank) : shard{layout, rank, 2} {
    for (const std::int32_t length : lengths) {
      starts.push_back(count);
      count += shard.local_len(length);
    }
  }
};

TEST_F(GradientKernels, KeysAreStoredWhereTheirSequencesLie) {
  constexpr std::int64_t kRoom = 300, kCapacity = 160;
  constexpr int kKvHeads = 2;
  for (const auto& [dtype, dim] : {std::pair{fp32, 24}, {bf16, 24}, {fp16, 5}}) {
    for (const Layout layout : {Layout::striped, Layout::contiguous}) {
      for (const bool apart : {false, true}) {
        for (const bool accumulate : {false, true}) {
          SCOPED_TRACE(std::string(name(dtype)) + " " + name(layout) + (apart ? " apart" : "") +
                       (accumulate ? " accumulated" : ""));
          const Keys keys(layout, 1);
          const std::int64_t row = std::int64_t{kKvHeads} * dim, rows = apart ? 3 * kCapacity : 200;
          const std::int64_t gap = apart ? 16 : 0;  // elements between sequences
          Both sums(floats(kKvHeads * kRoom * GradientSums::padded(dim)));
          std::vector<std::byte> there = elements(dtype, rows * row + 3 * gap);
          if (!accumulate) std::fill(there.begin(), there.end(), kPoison);
          Both to(there);
          Both lengths(keys.lengths);
          Both starts(keys.starts);
          for (const Device device : kDevices) {
            kernels::StoreGradientParams p;
            p.sums = {sums.on(device), kRoom, dim};
            p.count = kRoom;
            p.dtype = dtype;
            p.kv_heads = kKvHeads;
            p.to = TokenRows(to.on(device), row, dim);
            p.accumulate = accumulate;
            p.of_keys = true;
            p.keys.batch.size = 3;
            p.keys.batch.kv_len = lengths.on(device);
            p.keys.shard = keys.shard;
            p.keys.start = starts.on(device);
            if (apart) p.capacity = kCapacity;
            if (apart) p.to.gap = {gap, kCapacity};
            on(device).store_gradients(p, {});
          }
          EXPECT_EQ(bits(to.found(Device::cuda)), bits(to.found(Device::host)));
          std::int64_t written = 0;  // rows
          const std::vector<std::byte> found = to.found(Device::cuda);
          const auto bytes = static_cast<std::size_t>(row) * size_of(dtype);
          for (std::int64_t i = 0; i < rows; ++i) {
            const std::int64_t at = (i * row + (apart ? i / kCapacity * gap : 0)) *
                                    static_cast<std::int64_t>(size_of(dtype));
            written += std::memcmp(found.data() + at, there.data() + at, bytes) != 0;
          }
          EXPECT_EQ(written, keys.count);
        }
      }
    }
  }
}

/// Rows past the last sequence, and results of runs that differ, stay as they are.
TEST_F(GradientKernels, RowsAreStoredOnce) {
  constexpr std::int64_t kTokens = 40, kUsed = 33;
  constexpr int kKvHeads = 2, kGroup = 3, kDim = 12;
  const std::int64_t row = std::int64_t{kKvHeads} * kGroup * kDim;
  Both sums(floats(kKvHeads * kTokens * kGroup * GradientSums::padded(kDim)));
  Both starts(std::vector<std::int32_t>{0, 20, kUsed});
  for (const bool differ : {true, false}) {
    Both to(std::vector<float>(kTokens * row, kNan));
    Both digests(std::vector<std::uint64_t>{5, differ ? 6u : 5u});
    const auto report = on(Device::cuda).shared_memory(sizeof(std::uint64_t));
    for (const Device device : kDevices) {
      kernels::StoreGradientParams p;
      p.sums = {sums.on(device), kTokens * kGroup, kDim};
      p.count = kTokens * kGroup;
      p.kv_heads = kKvHeads;
      p.group = kGroup;
      p.to = TokenRows(to.on(device), row, kDim);
      p.batch.size = 2;
      p.batch.query_start = starts.on(device);
      if (device == Device::cuda)
        p.headers = {digests.on(device), 0, 2, 77, reinterpret_cast<std::uint64_t*>(report.get())};
      on(device).store_gradients(p, {});
    }
    const std::vector<float> found = to.found(Device::cuda), wanted = to.found(Device::host);
    EXPECT_TRUE(std::isnan(wanted[kUsed * row]) && !std::isnan(wanted[kUsed * row - 1]));
    std::uint64_t reported = 0;
    std::memcpy(&reported, report.get(), sizeof reported);
    if (differ) {
      EXPECT_EQ(bits(found), bits(std::vector<float>(found.size(), kNan)));
      EXPECT_EQ(reported, kernels::RunHeaders::reported(77, 1));
    } else {
      EXPECT_EQ(bits(found), bits(wanted));
      EXPECT_EQ(reported, 0u);
    }
  }
}

/// A rank that has no rows finds out too.
TEST_F(GradientKernels, RanksWithoutRowsCompareTheirRuns) {
  Both digests(std::vector<std::uint64_t>{5, 5, 6});
  const auto report = on(Device::cuda).shared_memory(sizeof(std::uint64_t));
  kernels::StoreGradientParams p;
  p.headers = {digests.on(Device::cuda), 1, 3, 9, reinterpret_cast<std::uint64_t*>(report.get())};
  on(Device::cuda).store_gradients(p, {});
  EXPECT_EQ(digests.found(Device::cuda)[2], 6u);  // and the kernel has ended
  std::uint64_t reported = 0;
  std::memcpy(&reported, report.get(), sizeof reported);
  EXPECT_EQ(reported, kernels::RunHeaders::reported(9, 2));
}

void expect_near(const std::vector<float>& found, const std::vector<float>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < found.size(); ++i)
    ASSERT_NEAR(found[i], wanted[i], 2e-6f * (1 + std::abs(wanted[i]))) << i;
}

/// Pairs side by side, or half a rotation apart, of some elements of a row.
TEST_F(GradientKernels, RotationsAreTurnedBack) {
  const std::vector<std::uint64_t> each = [&] {
    std::vector<std::uint64_t> turns(10);
    for (std::uint64_t& turn : turns) turn = std::uint64_t{random_()} << 40;
    return turns;
  }();
  constexpr int kKvHeads = 2, kGroup = 3, kDim = 24;
  constexpr std::int64_t kTokens = 31, kRoom = 120;
  for (const bool interleaved : {true, false}) {
    Both turns(each);
    Both starts(std::vector<std::int32_t>{0, 20, 29}), lengths(std::vector<std::int32_t>{50, 9});
    Both rows(floats(kKvHeads * kTokens * kGroup * GradientSums::padded(kDim)));
    Both of_keys(floats(kKvHeads * kRoom * GradientSums::padded(kDim)));
    const std::vector<float> before = rows.found(Device::host);
    const Keys keys(Layout::zigzag, 1);
    Both key_lengths(keys.lengths);
    Both key_starts(keys.starts);
    for (const Device device : kDevices) {
      const Rope rope{.dim = 20, .interleaved = interleaved, .turns = turns.on(device)};
      kernels::TurnBackParams p;
      p.rows.rope = rope;
      p.rows.geometry.tokens = kTokens;
      p.rows.geometry.heads = kKvHeads * kGroup;
      p.rows.geometry.kv_heads = kKvHeads;
      p.rows.geometry.batch.size = 2;
      p.rows.geometry.batch.query_start = starts.on(device);
      p.rows.geometry.batch.kv_len = lengths.on(device);
      p.sums = {rows.on(device), kTokens * kGroup, kDim};
      on(device).turn_back_sums(p, {});
      kernels::TurnBackKeysParams of;
      of.rope = rope;
      of.keys.batch.size = 3;
      of.keys.batch.kv_len = key_lengths.on(device);
      of.keys.shard = keys.shard;
      of.keys.start = key_starts.on(device);
      of.kv_heads = kKvHeads;
      of.sums = {of_keys.on(device), kRoom, kDim};
      on(device).turn_back_keys(of, {});
    }
    expect_near(rows.found(Device::cuda), rows.found(Device::host));
    expect_near(of_keys.found(Device::cuda), of_keys.found(Device::host));
    EXPECT_NE(rows.found(Device::cuda), before);
  }
}

TEST_F(GradientKernels, OfFp64AreRefused) {
  std::vector<double> none(16);
  EXPECT_THROW(on(Device::cuda).add_sums(none.data(), none.data(), 16, {}), Unsupported);
}

}  // namespace
}  // namespace longspan::tests
