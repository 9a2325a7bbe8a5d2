// The host's attention against float64: shapes, masks, types, layouts, and values that must not
// leak.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "longspan/error.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/host_problem.hpp"

namespace longspan::tests {
namespace {

class HostAttend : public ::testing::Test {
 protected:
  std::unique_ptr<kernels::Backend> backend_ = kernels::host_backend(2);

  void expect_exact(const HostShape& shape, const std::vector<Shard>& shards,
                    const std::vector<float>* sinks = nullptr) {
    const std::uint32_t seed = fresh_seed();
    HostProblem problem(shape, seed);
    EXPECT_TRUE(is_close(problem.error(problem.run(*backend_, shards, sinks), sinks)))
        << "seed " << seed;
  }
};

std::string describe(const HostShape& s) {
  std::string text = "heads " + std::to_string(s.heads) + "/" + std::to_string(s.kv_heads) +
                     " dim " + std::to_string(s.dim) + " " + name(s.dtype) + " causal " +
                     std::to_string(s.mask.causal) + " window " + std::to_string(s.mask.window) +
                     " right " + std::to_string(s.mask.right) + " softcap " +
                     std::to_string(s.softcap);
  for (std::size_t b = 0; b < s.kv_len.size(); ++b)
    text += " [" + std::to_string(s.query_len[b]) + " on " + std::to_string(s.kv_len[b]) + "]";
  return text;
}

TEST_F(HostAttend, EveryDimAndType) {
  for (int eights = 1; eights <= 32; ++eights) {
    for (const int dim : {8 * eights, 8 * eights - eights % 8}) {
      for (DType dtype : {fp32, fp16, bf16}) {
        HostShape shape{.dim = dim, .dtype = dtype, .query_len = {7}, .kv_len = {333}};
        SCOPED_TRACE(describe(shape));
        expect_exact(shape, {Shard::contiguous(333, 0, 1)});
      }
    }
  }
}

/// The elements of an array up to `end`, followed by a page that may not be read.
class BeforeAWall {
 public:
  BeforeAWall(const Array& array, std::int64_t end) {
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t used = static_cast<std::size_t>(end) * size_of(array.dtype);
    const std::size_t room = (used + page - 1) / page * page;
    bytes_ = room + page;
    memory_ = static_cast<std::byte*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory_ + room, page, PROT_NONE);
    data_ = memory_ + room - used;
    std::memcpy(data_, array.bytes.data(), used);
  }
  ~BeforeAWall() { munmap(memory_, bytes_); }
  BeforeAWall(const BeforeAWall&) = delete;
  BeforeAWall& operator=(const BeforeAWall&) = delete;

  void* data() const { return data_; }

 private:
  std::byte *memory_, *data_;
  std::size_t bytes_;
};

// In the tile that packs, and in those that read few rows in place.
TEST_F(HostAttend, NothingPastTheLastRowIsRead) {
  for (const int dim : {1, 3, 12, 15, 16, 21, 59, 64, 203})
    for (const auto& [dtype, kv_dtype] :
         {std::pair{fp32, fp32}, {fp16, fp16}, {bf16, bf16}, {bf16, e4m3}, {fp16, e5m2}})
      for (const std::int32_t queries : {1, 300}) {
        HostShape shape{.dim = dim, .dtype = dtype, .query_len = {queries}, .kv_len = {333}};
        shape.kv_dtype = shape.q_dtype = kv_dtype;
        SCOPED_TRACE(describe(shape) + " " + name(kv_dtype));
        HostProblem problem(shape, fresh_seed());
        const std::int64_t rows = problem.tokens() * shape.heads;
        std::vector<std::byte> memory(kernels::StateSlots::bytes(rows, dim));
        const kernels::StateSlots state{memory.data(), rows, dim, 1};
        auto p = problem.params(Shard::contiguous(333, 0, 1), state, 0);
        const BeforeAWall q(problem.q, problem.tokens() * problem.q_stride() - HostProblem::kGap);
        const std::int64_t keys = 333 * problem.kv_stride() - HostProblem::kGap;
        const BeforeAWall k(problem.k, keys), v(problem.v, keys);
        p.q.data = q.data();
        p.k = {k.data(), problem.kv_stride(), dim};
        p.v = {v.data(), problem.kv_stride(), dim};
        std::vector<std::byte> scratch(backend_->attend_scratch(p) + 256);
        p.scratch = scratch.data() + (256 - reinterpret_cast<std::uintptr_t>(scratch.data()) % 256);
        p.scratch_bytes = scratch.size() - 256;
        backend_->attend(p, {});
        const Result result =
            problem.merge(*backend_, state, p.shard.layout == Layout::interleaved, nullptr);
        EXPECT_TRUE(is_close(problem.error(result, nullptr)));
      }
}

TEST_F(HostAttend, RandomShapes) {
  std::mt19937 random(fresh_seed());
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int trial = 0; trial < tests::trials(150); ++trial) {
    HostShape shape;
    shape.kv_heads = draw(1, 3);
    shape.heads = shape.kv_heads * draw(1, 5);
    shape.dim = draw(0, 1) ? 8 * draw(2, 32) : draw(1, 256);
    shape.dtype = static_cast<DType>(draw(0, 2));
    shape.query_len.clear();
    shape.kv_len.clear();
    for (int b = draw(1, 4); b > 0; --b) {
      shape.query_len.push_back(draw(0, 3) ? draw(0, 9) : draw(0, 250));
      shape.kv_len.push_back(draw(0, 3) ? draw(0, 700) : draw(0, 5));
    }
    shape.mask.causal = draw(0, 1);
    if (draw(0, 1)) shape.mask.window = draw(1, 300);
    if (draw(0, 2) == 0) shape.mask.right = draw(0, 200);
    if (draw(0, 2) == 0) shape.softcap = static_cast<float>(draw(1, 50));
    std::vector<float> sinks(shape.heads);
    for (float& sink : sinks) sink = static_cast<float>(draw(-40, 40)) / 10;
    const int ranks = draw(1, 7);
    const int block = draw(0, 1) ? 128 * draw(1, 2) : draw(1, 200);
    const Shard shard = std::vector{Shard::contiguous(0, 0, ranks), Shard::zigzag(0, 0, ranks),
                                    Shard::striped(0, 0, ranks),
                                    Shard::interleaved(0, 0, ranks, block)}[draw(0, 3)];
    SCOPED_TRACE(describe(shape) + " " + name(shard.layout) + " on " + std::to_string(ranks));
    expect_exact(shape, HostProblem::on_all(shard), draw(0, 1) ? &sinks : nullptr);
  }
}

TEST_F(HostAttend, RangesWithEmptyShards) {
  const std::vector<std::int64_t> table = {0, 0, 1, 130, 130, 517};
  for (bool causal : {false, true})
    expect_exact({.query_len = {40}, .kv_len = {517}, .mask = {.causal = causal, .window = 200}},
                 HostProblem::on_all(Shard::ranges(517, 0, 5, table.data())));
}

TEST_F(HostAttend, ListedInAnyOrder) {
  const ListedKeys keys(fresh_seed());
  for (bool causal : {false, true})
    expect_exact({.query_len = {100}, .kv_len = {700}, .mask = {.causal = causal, .window = 50}},
                 keys.shards);
}

TEST_F(HostAttend, FarShardsAndOneKey) {
  for (int ranks : {2, 3, 7})
    for (std::int32_t kv_len : {0, 1, 2, 128, 129}) {
      HostShape shape{.query_len = {3}, .kv_len = {kv_len}, .mask = {.causal = true}};
      SCOPED_TRACE(describe(shape));
      for (const Shard& shard : {Shard::contiguous(0, 0, ranks), Shard::zigzag(0, 0, ranks),
                                 Shard::striped(0, 0, ranks), Shard::interleaved(0, 0, ranks)})
        expect_exact(shape, HostProblem::on_all(shard));
    }
}

TEST_F(HostAttend, LargeScores) {
  HostProblem problem({.dim = 32, .query_len = {4}, .kv_len = {400}}, fresh_seed());
  for (std::int64_t i = 0; i < problem.tokens() * problem.q_stride(); ++i)
    problem.q.set(i, static_cast<float>(problem.q[i]) * 300.0f);
  const auto error = problem.error(problem.run(*backend_));
  EXPECT_LT(error.out, 1e-4);        // scores of order 1000 carry an error of 1000 * 2^-24 each
  EXPECT_LT(error.worst_lse, 2e-6);  // relative
}

// Memory that no row of the sequence sees may hold anything.
TEST_F(HostAttend, UnseenKeysMayBeAnything) {
  for (float poison : {kNan, std::numeric_limits<float>::infinity()}) {
    HostProblem problem(
        {.query_len = {9, 5}, .kv_len = {600, 4}, .mask = {.causal = true, .window = 70}},
        fresh_seed());
    const Result clean = problem.run(*backend_);
    // Sequence 0: rows at 591 ... 599 with a window of 70 see from 522 on.
    for (std::int64_t key = 0; key < 522; ++key)
      for (std::int64_t c = 0; c < problem.kv_stride(); ++c) {
        problem.k.set(key * problem.kv_stride() + c, poison);
        problem.v.set(key * problem.kv_stride() + c, poison);
      }
    EXPECT_TRUE(problem.run(*backend_).same_bits(clean));
    EXPECT_TRUE(
        problem.run(*backend_, HostProblem::on_all(Shard::striped(0, 0, 2)))
            .same_bits(problem.run(*backend_, HostProblem::on_all(Shard::striped(0, 0, 2)))));
  }
}

// Stricter than the contract: a row is not affected by any key that it does not see itself.
TEST_F(HostAttend, KeysOfOtherRowsStayAway) {
  for (float poison : {kNan, std::numeric_limits<float>::infinity()}) {
    HostProblem problem({.query_len = {100}, .kv_len = {300}, .mask = {.causal = true}},
                        fresh_seed());
    const Result clean = problem.run(*backend_);
    for (std::int64_t c = 0; c < problem.kv_stride(); ++c) {
      problem.k.set(250 * problem.kv_stride() + c, poison);
      problem.v.set(250 * problem.kv_stride() + c, poison);
    }
    const Result result = problem.run(*backend_);
    const std::int64_t row = std::int64_t{problem.shape.heads} * problem.shape.dim;
    for (std::int64_t t = 0; t < 100; ++t) {
      const bool sees = 200 + t >= 250;
      for (std::int64_t c = 0; c < row; ++c) {
        if (sees)
          EXPECT_FALSE(std::isfinite(result.out[t * row + c])) << t;
        else
          EXPECT_EQ(result.out[t * row + c], clean.out[t * row + c]) << t;
      }
    }
  }
}

TEST_F(HostAttend, NanInAQueryStaysInItsRow) {
  for (float softcap : {0.0f, 20.0f}) {
    HostProblem problem({.heads = 6, .query_len = {50}, .kv_len = {520}, .softcap = softcap},
                        fresh_seed());
    const Result clean = problem.run(*backend_);
    const int dim = problem.shape.dim;
    problem.q.set(17 * problem.q_stride() + 2 * dim + 5, kNan);  // token 17, head 2
    const Result result = problem.run(*backend_);
    for (std::int64_t row = 0; row < 50 * 6; ++row) {
      for (int c = 0; c < dim; ++c) {
        if (row == 17 * 6 + 2)
          ASSERT_TRUE(std::isnan(result.out[row * dim + c]));
        else
          ASSERT_EQ(result.out[row * dim + c], clean.out[row * dim + c]) << row;
      }
      ASSERT_EQ(std::isnan(result.lse[row]), row == 17 * 6 + 2);
    }
  }
}

// A key whose score is -inf is an invisible key; with no other, the row is empty.
TEST_F(HostAttend, MinusInfinityIsInvisible) {
  HostProblem problem({.heads = 2, .kv_heads = 1, .dim = 16, .query_len = {1}, .kv_len = {200}},
                      fresh_seed());
  for (std::int64_t i = 0; i < 2 * 16; ++i) problem.q.set(i, 1.0f);
  HostProblem without = problem;
  for (std::int64_t key = 0; key < 200; ++key)
    problem.k.set(key * problem.kv_stride(), -std::numeric_limits<float>::infinity());
  const Result empty = problem.run(*backend_);
  for (float out : empty.out) EXPECT_EQ(out, 0.0f);
  for (float lse : empty.lse) EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());

  // Visible again but for the last 72.
  for (std::int64_t key = 0; key < 128; ++key)
    problem.k.set(key * problem.kv_stride(),
                  static_cast<float>(without.k[key * without.kv_stride()]));
  without.shape.kv_len = {128};
  EXPECT_TRUE(problem.run(*backend_).same_bits(without.run(*backend_)));
}

TEST_F(HostAttend, RowsPastTheBatchAreNotTouched) {
  HostProblem problem({.query_len = {3}, .kv_len = {200}}, fresh_seed());
  const std::int64_t rows = (problem.tokens() + 2) * problem.shape.heads;
  std::vector<std::byte> memory(kernels::StateSlots::bytes(rows, problem.shape.dim),
                                std::byte{0xff});
  const kernels::StateSlots state{memory.data(), rows, problem.shape.dim, 1};
  auto p = problem.params(Shard::contiguous(200, 0, 1), state, 0);
  p.tokens += 2;
  p.k = {problem.k.data(), problem.kv_stride(), problem.shape.dim};
  p.v = {problem.v.data(), problem.kv_stride(), problem.shape.dim};
  std::vector<std::byte> scratch(backend_->attend_scratch(p) + 256);
  p.scratch = scratch.data() + (256 - reinterpret_cast<std::uintptr_t>(scratch.data()) % 256);
  p.scratch_bytes = scratch.size() - 256;
  backend_->attend(p, {});
  const std::int64_t written = problem.tokens() * problem.shape.heads;
  for (std::int64_t row = 0; row < rows; ++row) {
    EXPECT_EQ(std::isnan(state.stats(0)[row].sum), row >= written);
    EXPECT_EQ(std::isnan(state.o(0, row)[0]), row >= written);
  }
}

TEST_F(HostAttend, RefusesByName) {
  HostProblem problem({}, 0);
  auto p = problem.params(Shard::contiguous(300, 0, 1), {}, 0);
  const auto refusal = [&](auto change) {
    auto changed = p;
    change(changed);
    try {
      backend_->check(changed);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refusal([](auto&) {}), "accepted");
  EXPECT_THAT(refusal([](auto& c) { c.head_dim = 0; }), ::testing::HasSubstr("head_dim 0"));
  EXPECT_THAT(refusal([](auto& c) { c.head_dim = 577; }), ::testing::HasSubstr("head_dim 577"));
  EXPECT_THAT(refusal([](auto& c) { c.value_dim = 0; }), ::testing::HasSubstr("value_dim 0"));
  EXPECT_THAT(refusal([](auto& c) { c.value_dim = 513; }), ::testing::HasSubstr("value_dim 513"));
  EXPECT_THAT(refusal([](auto& c) { c.heads = 5; }), ::testing::HasSubstr("kv_heads 2"));
}

}  // namespace
}  // namespace longspan::tests
