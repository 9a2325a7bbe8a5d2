// The layer on every rank count: against float64, and bit for bit against one process alone.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "longspan/longspan.hpp"
#include "tests/dist/message.hpp"
#include "tests/dist/world.hpp"
#include "tests/problem.hpp"
#include "tests/simulated.hpp"

namespace longspan::testing {
namespace {

/// A vector in the memory of the world's device.
template <class T>
Buffer to_device(const Communicator& world, const std::vector<T>& values) {
  Buffer buffer(world.device(), std::max<std::size_t>(16, values.size() * sizeof(T)));
  std::vector<std::byte> padded(buffer.bytes());
  if (!values.empty()) std::memcpy(padded.data(), values.data(), values.size() * sizeof(T));
  buffer.upload(padded.data());
  return buffer;
}

std::vector<std::byte> to_host(const Buffer& buffer, std::size_t bytes) {
  std::vector<std::byte> values(buffer.bytes());
  buffer.download(values.data());
  values.resize(bytes);
  return values;
}

struct Result {
  std::vector<std::byte> out;
  std::vector<float> lse;
};

Options options_for(const Problem& problem, const Communicator& world) {
  const Shape& s = problem.shape;
  return {.heads = s.heads,
          .kv_heads = s.kv_heads,
          .dim = s.dim,
          .dtype = s.dtype,
          .mask = s.mask,
          .softcap = s.softcap,
          .max_tokens = problem.tokens,
          .max_batch = problem.batch(),
          .invariant = world.device() == Device::cuda};
}

/// One run of a fresh layer; outputs are poisoned with NaN bytes first. `rows` of the queries are
/// this rank's own when they are sharded.
Result run(const Communicator& world, const Problem& problem, const Shard& shard, Options options,
           std::optional<Shard> query_shard = std::nullopt) {
  const Shape& s = problem.shape;
  const Device device = world.device();
  const std::vector<std::byte> own_q =
      query_shard ? problem.share_rows(problem.q, *query_shard) : problem.q;
  const std::int64_t rows = static_cast<std::int64_t>(own_q.size()) /
                            static_cast<std::int64_t>(size_of(s.dtype) * s.heads * s.dim);
  const std::vector<std::byte> own_k = problem.share(problem.k, shard);
  const std::int64_t keys = static_cast<std::int64_t>(own_k.size()) /
                            static_cast<std::int64_t>(size_of(s.dtype) * s.kv_heads * s.dim);
  if (query_shard) {
    options.shard_queries = true;
    std::int64_t most = 0;
    for (const std::string& n : world.gather(std::to_string(rows), "rows"))
      most = std::max<std::int64_t>(most, std::stoll(n));
    options.max_tokens = most;
  }

  const Buffer q = to_device(world, own_q), k = to_device(world, own_k),
               v = to_device(world, problem.share(problem.v, shard)),
               start = to_device(world, problem.query_start), lens = to_device(world, s.kv_lens),
               sinks = to_device(world, problem.sinks),
               out = to_device(world, std::vector<std::byte>(own_q.size(), std::byte{0xff})),
               lse = to_device(world, std::vector<float>(rows * s.heads, NAN));

  Attention layer(world, options);
  Request request{.q = Tensor(q.data(), s.dtype, {rows, s.heads, s.dim}, device),
                  .k = Tensor(k.data(), s.dtype, {keys, s.kv_heads, s.dim}, device),
                  .v = Tensor(v.data(), s.dtype, {keys, s.kv_heads, s.dim}, device),
                  .shard = shard,
                  .out = Tensor(out.data(), s.dtype, {rows, s.heads, s.dim}, device),
                  .lse = Tensor(lse.data(), DType::fp32, {rows, s.heads}, device)};
  request.batch = problem.batch();
  if (problem.batch() > 1) {
    request.query_start = static_cast<const std::int32_t*>(start.data());
    request.kv_len = static_cast<const std::int32_t*>(lens.data());
  }
  if (s.sinks) request.sinks = static_cast<const float*>(sinks.data());
  if (query_shard) request.query_shard = *query_shard;
  layer.run(request);
  layer.wait();

  Result result{to_host(out, own_q.size()), std::vector<float>(rows * s.heads)};
  const std::vector<std::byte> lse_bytes = to_host(lse, result.lse.size() * sizeof(float));
  std::memcpy(result.lse.data(), lse_bytes.data(), lse_bytes.size());
  return result;
}

std::vector<std::int64_t> all_rows(const Problem& problem) {
  std::vector<std::int64_t> rows(problem.tokens);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

/// Token of each of this rank's rows, sequence after sequence.
std::vector<std::int64_t> own_rows(const Problem& problem, const Shard& shard) {
  std::vector<std::int64_t> rows;
  for (int b = 0; b < problem.batch(); ++b)
    for (std::int64_t i = 0; i < shard.local_len(problem.shape.q_lens[b]); ++i)
      rows.push_back(problem.query_start[b] + shard.position(i, problem.shape.q_lens[b]));
  return rows;
}

void expect_exact(const Problem& problem, const Result& result,
                  const std::vector<std::int64_t>& rows) {
  EXPECT_LE(problem.max_error(result.out, rows), problem.tolerance());
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (int h = 0; h < problem.shape.heads; ++h) {
      const double expected = problem.exact(rows[i], h).lse;
      const float found = result.lse[i * problem.shape.heads + h];
      if (std::isinf(expected)) {
        EXPECT_EQ(found, expected);
      } else {
        EXPECT_NEAR(found, expected, problem.shape.dtype == DType::fp32 ? 1e-5 : 2e-2);
      }
    }
}

std::vector<Shape> shapes() {
  return {
      {.mask = {.causal = true}},
      {.heads = 6, .kv_heads = 1, .dim = 80, .q_lens = {3}, .kv_lens = {1000}},
      {.dtype = DType::bf16, .q_lens = {130}, .kv_lens = {700}, .mask = {.causal = true}},
      {.dtype = DType::fp16, .q_lens = {9}, .kv_lens = {513}, .mask = {.window = 100, .right = 7}},
      {.q_lens = {7}, .kv_lens = {2}, .mask = {.causal = true}},  // more queries than keys
      {.q_lens = {4}, .kv_lens = {0}},                            // no keys at all
      {.q_lens = {2}, .kv_lens = {1}, .sinks = true},
      {.dim = 128,
       .q_lens = {20},
       .kv_lens = {900},
       .mask = {.causal = true, .window = 200},
       .softcap = 20.0f,
       .sinks = true},
      {.q_lens = {1, 0, 17, 40}, .kv_lens = {333, 50, 0, 40}, .mask = {.causal = true}},
      {.heads = 5,
       .kv_heads = 5,
       .dim = 24,
       .dtype = DType::bf16,
       .q_lens = {1, 1, 1},
       .kv_lens = {1, 600, 129},
       .sinks = true},
  };
}

TEST(Layer, AgreesWithFloat64InEveryLayout) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : shapes()) {
    const Problem problem(shape, seed);
    const std::int64_t length = shape.kv_lens[0];
    for (Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved})
      for (std::int64_t block : {16, 128}) {
        SCOPED_TRACE(std::string(name(layout)) + " kv " + std::to_string(length) + " dim " +
                     std::to_string(shape.dim) + " seed " + std::to_string(seed));
        const Shard shard{layout, world.rank(), world.size(), length, block};
        expect_exact(problem, run(world, problem, shard, options_for(problem, world)),
                     all_rows(problem));
        if (layout != Layout::interleaved) break;
      }
  }
}

TEST(Layer, ShardedQueriesGetTheirOwnRows) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : shapes()) {
    const Problem problem(shape, seed);
    for (Layout layout :
         {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved}) {
      SCOPED_TRACE(std::string(name(layout)) + " kv " + std::to_string(shape.kv_lens[0]) +
                   " seed " + std::to_string(seed));
      const Shard shard{layout, world.rank(), world.size(), shape.kv_lens[0], 16};
      Shard rows = shard;
      rows.length = problem.tokens;
      expect_exact(problem, run(world, problem, shard, options_for(problem, world), rows),
                   own_rows(problem, rows));
    }
  }
}

TEST(Layer, TakesUnevenRangesAndListedPositions) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  const Problem problem({.q_lens = {40}, .kv_lens = {500}, .mask = {.causal = true, .window = 90}},
                        seed);
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> cuts(world.size() + 1, 0), order(500);
  for (int r = 1; r < world.size(); ++r) cuts[r] = static_cast<std::int64_t>(random() % 501);
  cuts.back() = 500;
  std::sort(cuts.begin(), cuts.end());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  const std::int64_t first = cuts[world.rank()], count = cuts[world.rank() + 1] - first;

  // The table lies where the kernels run; the host's copy cuts the data.
  const auto check = [&](Shard on_host, const std::vector<std::int64_t>& table) {
    const Buffer copy = to_device(world, table);
    Shard on_device = on_host;
    on_host.table = table.data();
    on_device.table = static_cast<const std::int64_t*>(copy.data());
    Problem own = problem;
    const std::vector<std::byte> k = own.share(own.k, on_host), v = own.share(own.v, on_host);
    const Shape& s = own.shape;
    const Buffer dq = to_device(world, own.q), dk = to_device(world, k), dv = to_device(world, v),
                 out = to_device(world, std::vector<std::byte>(own.q.size(), std::byte{0xff}));
    const Device device = world.device();
    const std::int64_t keys = on_host.local_len(500);
    attend(world,
           {.q = Tensor(dq.data(), s.dtype, {40, s.heads, s.dim}, device),
            .k = Tensor(dk.data(), s.dtype, {keys, s.kv_heads, s.dim}, device),
            .v = Tensor(dv.data(), s.dtype, {keys, s.kv_heads, s.dim}, device),
            .shard = on_device,
            .out = Tensor(out.data(), s.dtype, {40, s.heads, s.dim}, device)},
           {.mask = s.mask});
    EXPECT_LE(own.max_error(to_host(out, own.q.size()), all_rows(own)), own.tolerance());
  };
  check(Shard::ranges(500, world.rank(), world.size(), nullptr), cuts);
  const std::vector<std::int64_t> listed(order.begin() + first, order.begin() + first + count);
  check(Shard::at(500, world.rank(), world.size(), nullptr, count), listed);
}

TEST(Layer, SameBitsAsOneProcessAlone) {
  const Communicator world = test_world(), alone = self(world.device());
  const std::uint64_t seed = shared_seed(world);
  for (std::int32_t kv_len : {1, 127, 4097, 5000, 131073})
    for (DType dtype : {DType::fp32, DType::bf16})
      for (std::int32_t rows : {1, 40}) {
        if (kv_len == 131073 && (rows > 1 || dtype != DType::fp32)) continue;  // time
        if (kv_len > 4097 && kSimulated) continue;
        const Problem problem({.heads = 2,
                               .kv_heads = 1,
                               .dtype = dtype,
                               .q_lens = {rows},
                               .kv_lens = {kv_len},
                               .mask = {.causal = true}},
                              seed);
        for (Layout layout : {Layout::contiguous, Layout::interleaved}) {
          SCOPED_TRACE(std::string(name(layout)) + " kv " + std::to_string(kv_len) + " seed " +
                       std::to_string(seed));
          const Shard own{layout, world.rank(), world.size(), kv_len};
          const Shard whole{layout, 0, 1, kv_len};
          const Result shared = run(world, problem, own, options_for(problem, world));
          const Result single = run(alone, problem, whole, options_for(problem, alone));
          if (own.keeps_order()) {
            EXPECT_EQ(shared.out, single.out);
            EXPECT_EQ(shared.lse, single.lse);
          }
          for (const std::string& text : world.gather(
                   std::string(reinterpret_cast<const char*>(shared.out.data()), shared.out.size()),
                   "comparison"))
            EXPECT_EQ(0, std::memcmp(text.data(), shared.out.data(), text.size()))
                << "ranks got different bits";
        }
      }
}

TEST(Layer, DifferentOptionsAreAnErrorOnEveryRank) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  Options options{.heads = 4, .kv_heads = 2, .dim = 64, .dtype = DType::fp32};
  options.mask.window = world.rank() == world.size() - 1 ? 7 : 3;
  try {
    Attention layer(world, options);
    FAIL() << "ranks disagreed and nobody said so";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("window"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("7"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("3"), std::string::npos) << error.what();
  }
}

TEST(Layer, RefusesByNameWhatItCannotDo) {
  const Communicator world = test_world();
  const Options good{.heads = 4, .kv_heads = 2, .dim = 64, .dtype = DType::fp32};
  Options bad = good;
  bad.dim = 20;
  EXPECT_THROW(Attention(world, bad), Unsupported);
  bad = good;
  bad.kv_heads = 3;
  EXPECT_THROW(Attention(world, bad), UsageError);
  bad = good;
  bad.strategy = "telepathy";
  EXPECT_THROW(Attention(world, bad), Unsupported);
}

TEST(Layer, RefusesRequestsThatDoNotFit) {
  const Communicator world = test_world();
  const Device device = world.device();
  Attention layer(world,
                  {.heads = 2, .kv_heads = 1, .dim = 64, .dtype = DType::fp32, .max_tokens = 4});
  const Buffer memory(device, 1 << 20);
  const auto tensor = [&](std::int64_t rows, std::int64_t heads, std::int64_t dim,
                          DType dtype = DType::fp32) {
    return Tensor(memory.data(), dtype, {rows, heads, dim}, device);
  };
  const Shard shard = Shard::contiguous(10, world.rank(), world.size());
  const Request good{.q = tensor(4, 2, 64),
                     .k = tensor(10, 1, 64),
                     .v = tensor(10, 1, 64),
                     .shard = shard,
                     .out = tensor(4, 2, 64)};
  const auto refused = [&](auto change) {
    Request request = good;
    change(request);
    EXPECT_THROW(layer.run(request), InputError);
  };
  refused([&](Request& r) { r.q = r.out = tensor(5, 2, 64); });
  refused([&](Request& r) { r.q = tensor(4, 2, 64, DType::bf16); });
  refused([&](Request& r) { r.out = tensor(3, 2, 64); });
  refused([&](Request& r) { r.k = tensor(10, 2, 64); });
  refused([&](Request& r) { r.v = tensor(9, 1, 64); });
  refused([&](Request& r) { r.batch = 2; });
  refused([&](Request& r) { r.q.stride[2] = 2; });
  refused([&](Request& r) { r.shard.rank += 1; });
  refused([&](Request& r) { r.shard.length = 1000; });
  refused([&](Request& r) { r.lse = tensor(4, 2, 64); });
}

}  // namespace
}  // namespace longspan::testing
