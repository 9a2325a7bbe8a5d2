// Dropout on a GPU through a layer: the mask of every kernel that has it, which values reveal that
// are rows of the identity; and seeds that a run reads from the GPU's memory.
#include <cmath>
#include <string>
#include <vector>

#include "longspan/longspan.hpp"
#include "tests/gpu/gpu_judge.hpp"

namespace longspan::test {
namespace {

struct Products {
  const char* name;
  DType dtype;
  bool tf32 = false, invariant = false;
  int columns = 200;  // and keys
  double tolerance = 1e-5;
};

constexpr int kHeads = 4, kKvHeads = 2, kRows = 40, kDim = 8;

/// Queries of 0 and the identity as values: out[row, head, j] = z_j / (keys that the row sees).
void check_mask(const Products& of, std::vector<std::int64_t> seed, std::int64_t other_seed) {
  SCOPED_TRACE(of.name);
  const int keys = of.columns;
  const auto stored = [&](const std::vector<float>& values) {
    std::vector<std::byte> bytes(values.size() * size_of(of.dtype));
    for (std::size_t i = 0; i < values.size(); ++i)
      launcher::store(bytes.data(), of.dtype, static_cast<std::int64_t>(i), values[i]);
    return OnGpu<std::byte>(bytes);
  };
  std::vector<float> identity;
  for (int j = 0; j < keys; ++j)
    for (int h = 0; h < kKvHeads; ++h)
      for (int c = 0; c < of.columns; ++c) identity.push_back(c == j ? 1.0f : 0.0f);
  const auto q = stored(std::vector<float>(std::size_t{kRows} * kHeads * kDim)),
             k = stored(std::vector<float>(static_cast<std::size_t>(keys) * kKvHeads * kDim, 1.0f)),
             v = stored(identity);
  const std::size_t elements = std::size_t{kRows} * kHeads * static_cast<std::size_t>(of.columns);
  const OnGpu<std::byte> out(elements * size_of(of.dtype));
  const OnGpu<std::int64_t> seeds(seed);
  const OnGpu<std::int32_t> numbers(std::vector<std::int32_t>{9});

  Options options{.heads = kHeads, .kv_heads = kKvHeads, .head_dim = kDim, .value_dim = of.columns};
  options.dtypes.compute = of.dtype;
  options.dtypes.tf32 = of.tf32;
  options.invariant = of.invariant;
  options.mask.causal = true;
  options.dropout = {.p = 0.3, .first_head = 5};
  options.limits.max_tokens = kRows;
  Attention layer(self(Device::cuda), options);
  AttentionArgs args;
  args.q = Tensor(q.data(), of.dtype, {kRows, kHeads, kDim}, Device::cuda);
  args.k = Tensor(k.data(), of.dtype, {keys, kKvHeads, kDim}, Device::cuda);
  args.v = Tensor(v.data(), of.dtype, {keys, kKvHeads, of.columns}, Device::cuda);
  args.out = Tensor(out.data(), of.dtype, {kRows, kHeads, of.columns}, Device::cuda);
  args.total_keys = keys;
  args.dropout_seed = Tensor(seeds.data(), {std::ssize(seed)}, Device::cuda);
  args.dropout_sequences = Tensor(numbers.data(), {1}, Device::cuda);
  for (const std::int64_t used : {seed[0], other_seed}) {
    ASSERT_EQ(cudaMemcpy(seeds.data(), &used, sizeof used, cudaMemcpyDefault), cudaSuccess);
    ASSERT_EQ(cudaMemset(out.data(), 0xff, out.buffer.bytes()), cudaSuccess);
    layer.run(args);
    layer.wait();
    const std::vector<std::byte> found = out.values(out.buffer.bytes());
    std::int64_t wrong = 0;
    for (int t = 0; t < kRows; ++t)
      for (int h = 0; h < kHeads; ++h) {
        const std::int64_t position = keys - kRows + t;
        const launcher::DropoutOf row{0.3,
                                      static_cast<std::uint64_t>(used),
                                      seed.size() > 1 ? static_cast<std::uint64_t>(seed[1]) : 0,
                                      9,
                                      static_cast<std::uint32_t>(5 + h),
                                      position};
        const std::vector<double> z = launcher::dropout_factors<float>(row, keys);
        for (int c = 0; c < of.columns; ++c) {
          const double wanted =
              c <= position ? z[static_cast<std::size_t>(c)] / static_cast<double>(position + 1)
                            : 0;
          const float got = launcher::load(found.data(), of.dtype,
                                           (std::int64_t{t} * kHeads + h) * of.columns + c);
          wrong += wanted == 0 ? got != 0.0f : !(std::abs(got / wanted - 1) < of.tolerance);
        }
      }
    EXPECT_EQ(wrong, 0) << "seed " << used;
  }
}

TEST(DropoutOnGpu, HasTheMaskOfTheOracle) {
  LONGSPAN_NEEDS_GPU();
  for (const Products& of :
       {Products{.name = "fp32", .dtype = DType::fp32},
        Products{.name = "tf32", .dtype = DType::fp32, .tf32 = true, .tolerance = 2e-3},
        Products{.name = "fp16", .dtype = DType::fp16, .tolerance = 4e-3},
        Products{.name = "bf16", .dtype = DType::bf16, .tolerance = 2e-2},
        Products{.name = "bf16 in the fixed order",
        .dtype = DType::bf16,
        .invariant = true,
        .tolerance = 2e-2},
        Products{.name = "fp16 of wide values",
        .dtype = DType::fp16,
        .columns = 300,
        .tolerance = 4e-3}})
    check_mask(of, {-77, 3}, 12345678901234);
  check_mask({.name = "without an offset", .dtype = DType::fp32}, {1}, 2);
}

/// Short queries, which decode kernels would serve, and long ones, which those of Hopper would.
TEST(DropoutOnGpu, OfAnyLength) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    Case c{.dtype = dtype, .q_lens = {1, 3}, .kv_lens = {300, 200}, .dropout = 0.5};
    c.mask.causal = true;
    for (const std::vector<int>& lengths : {c.q_lens, std::vector<int>{70, 20}}) {
      c.q_lens = lengths;
      const Data data(c);
      expect_exact(c, data, GpuRun(c, data).run());
    }
  }
}

}  // namespace
}  // namespace longspan::test
