// The options of serving engines, on the host against float64: each feature alone, all together, on
// 1, 2 and 4 shards.
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <string>

#include "longspan/error.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/host_problem.hpp"

namespace longspan::tests {
namespace {

/// One rank, then 2 and 4 in each layout that a sharded cache has.
std::vector<Shard> every_shard() {
  std::vector<Shard> shards = {Shard::contiguous(0, 0, 1), Shard::interleaved(0, 0, 1)};
  for (int ranks : {2, 4}) {
    shards.push_back(Shard::contiguous(0, 0, ranks));
    for (int block : {1, 16, 128}) shards.push_back(Shard::interleaved(0, 0, ranks, block));
  }
  return shards;
}

std::string describe(const HostShape& s) {
  return "heads " + std::to_string(s.heads) + "/" + std::to_string(s.kv_heads) + " dim " +
         std::to_string(s.dim) + " " + name(s.dtype) + " kv " + name(s.kv_dtype.value_or(s.dtype)) +
         " page " + std::to_string(s.page) + " store " + std::to_string(static_cast<int>(s.store)) +
         " window " + std::to_string(s.mask.window);
}

std::string describe(const Shard& s) {
  return std::string(name(s.layout)) + " of " + std::to_string(s.block) + " on " +
         std::to_string(s.ranks);
}

class HostFeatures : public ::testing::Test {
 protected:
  std::unique_ptr<kernels::Backend> backend_ = kernels::host_backend(2);

  void expect_exact(HostProblem& problem, const std::vector<Shard>& shards,
                    const std::vector<float>* sinks = nullptr) {
    EXPECT_TRUE(is_close(problem.error(problem.run(*backend_, shards, sinks), sinks)));
  }
  void expect_exact(const HostShape& shape, const std::vector<Shard>& shards) {
    const std::uint32_t seed = fresh_seed();
    SCOPED_TRACE(describe(shape) + " " + describe(shards[0]) + " seed " + std::to_string(seed));
    HostProblem problem(shape, seed);
    expect_exact(problem, shards);
  }
};

/// Mixed lengths: a chunk, a decode, a chunk without context, nothing.
HostShape mixed() {
  return {.query_len = {37, 1, 70, 0}, .kv_len = {300, 421, 70, 33}, .mask = {.causal = true}};
}

/// All features that can be combined.
HostShape everything() {
  HostShape s = mixed();
  s.dtype = bf16;
  s.q_dtype = e4m3;
  s.kv_dtype = e4m3;
  s.mask.window = 250;
  s.softcap = 20.0f;
  s.page = 16;
  s.scales = s.scales_per_head = true;
  s.alibi = Alibi::context;
  s.qq = true;
  s.causal = {1, 0, 1, 1};
  return s;
}

TEST_F(HostFeatures, EachAlone) {
  const std::vector<std::pair<const char*, std::function<void(HostShape&)>>> features = {
      {"nothing", [](HostShape&) {}},
      {"window", [](HostShape& s) { s.mask.window = 100; }},
      {"not causal", [](HostShape& s) { s.mask = {.causal = false, .window = 60, .right = 20}; }},
      {"causal per sequence",
       [](HostShape& s) {
         s.causal = {0, 1, 1, 0};
       }},
      {"softcap", [](HostShape& s) { s.softcap = 3.0f; }},
      {"ALiBi context", [](HostShape& s) { s.alibi = Alibi::context; }},
      {"ALiBi query", [](HostShape& s) { s.alibi = Alibi::query; }},
      {"ALiBi query, both sides",
       [](HostShape& s) {
         s.alibi = Alibi::query;
         s.mask.causal = false;
       }},
      {"ALiBi sqrt", [](HostShape& s) { s.alibi = Alibi::sqrt; }},
      {"ALiBi sqrt, both sides",
       [](HostShape& s) {
         s.alibi = Alibi::sqrt;
         s.mask.causal = false;
       }},
      {"slopes of sequences",
       [](HostShape& s) {
         s.alibi = Alibi::query;
         s.slopes_of_sequences = true;
       }},
      {"slopes in bf16",
       [](HostShape& s) {
         s.alibi = Alibi::context;
         s.bias_dtype = bf16;
       }},
      {"qq_bias", [](HostShape& s) { s.qq = true; }},
      {"qq_bias in fp16",
       [](HostShape& s) {
         s.qq = true;
         s.bias_dtype = fp16;
       }},
      {"pages", [](HostShape& s) { s.page = 16; }},
      {"x-packed",
       [](HostShape& s) {
         s.page = 16;
         s.store = Store::x_packed;
       }},
      {"keys in e4m3", [](HostShape& s) { s.kv_dtype = e4m3; }},
      {"keys in e5m2", [](HostShape& s) { s.kv_dtype = e5m2; }},
      {"queries in e4m3", [](HostShape& s) { s.q_dtype = e4m3; }},
      {"queries in e5m2", [](HostShape& s) { s.q_dtype = e5m2; }},
      {"scales", [](HostShape& s) { s.scales = true; }},
      {"scales per head", [](HostShape& s) { s.scales = s.scales_per_head = true; }},
      {"skip decode", [](HostShape& s) { s.skip_decode = true; }},
      {"parts", [](HostShape& s) { s.parts = {.count = 3}; }},
  };
  for (const auto& [name, switch_on] : features) {
    SCOPED_TRACE(name);
    int turn = 0;
    for (const Shard& shard : every_shard()) {
      HostShape shape = mixed();
      shape.dtype = static_cast<DType>(turn++ % 3);
      switch_on(shape);
      expect_exact(shape, HostProblem::on_all(shard));
    }
  }
}

TEST_F(HostFeatures, AllTogether) {
  const std::vector<float> sinks = {0.3f, -1.0f, 2.0f, 0.0f};
  for (const Shard& shard : every_shard()) {
    for (DType kv_dtype : {bf16, e4m3, e5m2}) {
      for (Store store : {Store::rows, Store::x_packed, Store::odd}) {
        HostShape shape = everything();
        shape.kv_dtype = kv_dtype;
        shape.store = store;
        const std::uint32_t seed = fresh_seed();
        SCOPED_TRACE(describe(shape) + " " + describe(shard) + " seed " + std::to_string(seed));
        HostProblem problem(shape, seed);
        expect_exact(problem, HostProblem::on_all(shard), &sinks);
      }
    }
  }
}

TEST_F(HostFeatures, EveryGroupAndDim) {
  for (int group : {1, 4, 5, 7, 64}) {
    HostShape shape = everything();
    shape.heads = group * shape.kv_heads;
    shape.query_len = {5, 1, 3, 0};
    shape.kv_len = {300, 143, 3, 9};
    for (int dim : {16, 24, 80, 96, 112, 128, 192, 256}) {
      shape.dim = dim;
      shape.store = dim % 32 ? Store::rows : Store::x_packed;
      expect_exact(shape, HostProblem::on_all(Shard::interleaved(0, 0, 2, 16)));
    }
  }
}

TEST_F(HostFeatures, AtRandom) {
  for (int trial = 0; trial < tests::trials(150); ++trial) {
    const std::uint32_t seed = fresh_seed();
    SCOPED_TRACE("shape of seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto draw = [&](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(random);
    };
    HostShape s;
    s.kv_heads = draw(1, 3);
    s.heads = s.kv_heads * draw(1, 8);
    s.dim = 8 * draw(2, 32);
    s.dtype = static_cast<DType>(draw(0, 2));
    if (draw(0, 1)) s.kv_dtype = draw(0, 1) ? e4m3 : e5m2;
    if (draw(0, 2) == 0) s.q_dtype = draw(0, 1) ? e4m3 : e5m2;
    s.query_len.clear();
    s.kv_len.clear();
    for (int b = draw(1, 4); b > 0; --b) {
      s.query_len.push_back(draw(0, 3) ? draw(0, 9) : draw(0, 150));
      s.kv_len.push_back(draw(0, 3) ? draw(0, 700) : draw(0, 5));
      s.causal.push_back(static_cast<std::uint8_t>(draw(0, 1)));
    }
    if (draw(0, 1)) s.causal.clear();
    s.mask.causal = draw(0, 1);
    if (draw(0, 1)) s.mask.window = draw(1, 300);
    if (draw(0, 2) == 0) s.mask.right = draw(0, 200);
    if (draw(0, 2) == 0) s.softcap = static_cast<float>(draw(1, 50));
    if (draw(0, 2)) s.page = std::vector{1, 3, 8, 16, 32, 64, 128, 256, 544}[draw(0, 8)];
    s.store = static_cast<Store>(draw(0, 2));
    s.scales = draw(0, 1);
    s.scales_per_head = draw(0, 1);
    if (draw(0, 1)) s.alibi = static_cast<Alibi>(draw(0, 2));
    s.slopes_of_sequences = draw(0, 1);
    s.qq = draw(0, 1);
    s.bias_dtype = static_cast<DType>(draw(0, 2));
    s.skip_decode = draw(0, 3) == 0;
    if (draw(0, 3) == 0) s.parts = {.count = draw(1, 20), .keys = draw(0, 1) ? 200 : 0};
    if (s.parts.keys) s.parts.count = 4;  // covers all
    const int ranks = draw(1, 5);
    const Shard shard = std::vector{
        Shard::contiguous(0, 0, ranks), Shard::zigzag(0, 0, ranks), Shard::striped(0, 0, ranks),
        Shard::interleaved(0, 0, ranks, draw(0, 1) ? 128 : draw(1, 200))}[draw(0, 3)];
    expect_exact(s, HostProblem::on_all(shard));
  }
}

TEST_F(HostFeatures, PagesGiveTheBitsOfContiguousKeys) {
  for (DType kv_dtype : {fp32, fp16, bf16, e4m3, e5m2}) {
    HostShape shape = mixed();
    shape.dim = 72;
    shape.dtype = is_fp8(kv_dtype) ? fp16 : kv_dtype;
    shape.kv_dtype = kv_dtype;
    shape.mask.window = 200;
    HostProblem problem(shape, fresh_seed());
    for (const Shard& shard : {Shard::contiguous(0, 0, 1), Shard::interleaved(0, 0, 2, 16)}) {
      problem.shape.page = 0;
      const Result contiguous = problem.run(*backend_, HostProblem::on_all(shard));
      for (int page : {1, 7, 8, 16, 32, 64, 128, 256, 544}) {
        for (Store store : {Store::rows, Store::x_packed, Store::odd}) {
          problem.shape.page = page;
          problem.shape.store = store;
          EXPECT_TRUE(problem.run(*backend_, HostProblem::on_all(shard)).same_bits(contiguous))
              << describe(problem.shape) << " " << describe(shard);
        }
      }
    }
  }
}

TEST_F(HostFeatures, PagesMayRepeat) {
  HostShape shape{.query_len = {9, 3}, .kv_len = {640, 640}, .page = 32};
  HostProblem problem(shape, fresh_seed());
  const std::int64_t row = problem.kv_stride() * 4;
  for (Array* a : {&problem.k, &problem.v})  // 64 keys, twenty times
    for (std::int64_t key = 64; key < 1280; ++key)
      std::copy_n(a->bytes.begin() + key % 64 * row, row, a->bytes.begin() + key * row);
  const Local local = problem.local(Shard::contiguous(0, 0, 1));
  EXPECT_EQ(local.table[0], local.table[2 * Whole::kColumnStride]);
  expect_exact(problem, {Shard::contiguous(0, 0, 1)});
}

TEST_F(HostFeatures, RanksGiveTheSameBits) {
  HostShape shape = everything();
  shape.query_len = {37, 1, 70, 4};
  shape.kv_len = {3000, 9000, 70, 520};
  shape.mask.window = 2500;
  for (Alibi alibi : {Alibi::context, Alibi::query, Alibi::sqrt}) {
    for (Store store : {Store::rows, Store::x_packed}) {
      shape.alibi = alibi;
      shape.store = store;
      HostProblem problem(shape, fresh_seed());
      for (const Shard& rule : {Shard::contiguous(0, 0, 1), Shard::interleaved(0, 0, 1, 128)}) {
        const Result one = problem.run(*backend_, {rule});
        EXPECT_TRUE(is_close(problem.error(one)));
        for (int ranks : {2, 4}) {
          Shard shard = rule;
          shard.ranks = ranks;
          EXPECT_TRUE(problem.run(*backend_, HostProblem::on_all(shard)).same_bits(one))
              << describe(shard);
        }
        EXPECT_TRUE(problem.run(*kernels::host_backend(7), {rule}).same_bits(one));
      }
    }
  }
}

TEST_F(HostFeatures, Documents) {
  // Rows before the first document and past the last see nothing, and their table entries are bad.
  for (const std::vector<std::int64_t>& documents :
       {std::vector<std::int64_t>{0, 100, 101, 101, 380, 600}, {40, 300, 590}, {600}, {7, 7}}) {
    for (bool causal : {false, true}) {
      for (int page : {0, 8}) {
        HostShape shape{
            .query_len = {600}, .kv_len = {600}, .mask = {.causal = causal}, .page = page};
        shape.documents = documents;
        for (const Shard& shard : every_shard()) expect_exact(shape, HostProblem::on_all(shard));
        shape.query_len = {90};
        shape.mask.window = 70;
        expect_exact(shape, HostProblem::on_all(Shard::zigzag(0, 0, 3)));
      }
    }
  }
}

TEST_F(HostFeatures, RangesOfABatch) {
  HostShape shape = everything();
  const std::vector<std::int64_t> table = {0, 263, 263, 300, 0, 0, 420, 421,
                                           0, 1,   65,  70,  0, 0, 0,   33};
  expect_exact(shape, HostProblem::on_all(Shard::ranges(0, 0, 3, table.data())));
  shape.page = 0;
  expect_exact(shape, HostProblem::on_all(Shard::ranges(0, 0, 3, table.data())));
}

TEST_F(HostFeatures, ListedKeysInPages) {
  std::vector<std::int64_t> positions(700);
  std::iota(positions.begin(), positions.end(), 0);
  std::shuffle(positions.begin(), positions.end(), std::mt19937(fresh_seed()));
  const std::vector<Shard> shards = {Shard::at_positions(700, 0, 2, positions.data(), 450),
                                     Shard::at_positions(700, 1, 2, positions.data() + 450, 250)};
  for (int page : {1, 2, 16}) {
    HostShape shape{.query_len = {100}, .kv_len = {700}, .mask = {.causal = true, .window = 50}};
    shape.page = page;
    shape.alibi = Alibi::query;
    shape.qq = true;
    expect_exact(shape, shards);
  }
}

TEST_F(HostFeatures, EachPartHoldsItsKeys) {
  for (const kernels::KeyParts parts :
       {kernels::KeyParts{.count = 5}, kernels::KeyParts{.count = 7, .keys = 100},
        kernels::KeyParts{.count = 3, .keys = 256}, kernels::KeyParts{.count = 60, .tile = 32}}) {
    HostShape shape{.query_len = {40}, .kv_len = {555}, .mask = {.causal = true, .window = 400}};
    shape.parts = parts;
    shape.page = 16;
    HostProblem problem(shape, fresh_seed());
    for (int s = 0; s < parts.count; ++s) {
      problem.only = parts.of(s, 555);
      const auto error =
          problem.error(problem.run(*backend_, {Shard::contiguous(0, 0, 1)}, nullptr, s));
      EXPECT_TRUE(is_close(error)) << s;  // zeros and -inf where a part is empty
    }
  }
}

TEST_F(HostFeatures, SoftcapFarAboveTheCap) {
  for (float cap : {0.01f, 0.05f, 1.0f}) {  // |score / cap| from 0 to 1000 and more
    HostShape shape{.query_len = {20}, .kv_len = {400}, .softcap = cap};
    HostProblem problem(shape, fresh_seed());
    for (std::int64_t t = 0; t < 20; ++t)
      for (int c = 0; c < 4 * 64; ++c)
        problem.q.set(t * problem.q_stride() + c,
                      static_cast<float>(problem.q[t * problem.q_stride() + c] * 10));
    expect_exact(problem, {Shard::contiguous(0, 0, 1)});
  }
}

// A bias of -inf hides a key from a row, whatever the key holds; without other keys the row is
// empty.
TEST_F(HostFeatures, HiddenKeysStayAway) {
  for (float poison : {kNan, std::numeric_limits<float>::infinity()}) {
    HostShape shape{.query_len = {12}, .kv_len = {200}, .mask = {.causal = true}, .qq = true};
    HostProblem problem(shape, fresh_seed());
    const std::int64_t stride = problem.qq_width() + HostProblem::kGap;
    for (int t = 6; t < 12; ++t)  // rows 6 ... 11 do not see the key of token 5
      problem.qq.set(t * stride + 5, -std::numeric_limits<float>::infinity());
    const Result clean = problem.run(*backend_);
    for (std::int64_t c = 0; c < problem.kv_stride(); ++c) {
      problem.k.set(193 * problem.kv_stride() + c, poison);
      problem.v.set(193 * problem.kv_stride() + c, poison);
    }
    const Result result = problem.run(*backend_);
    const int row = problem.shape.heads * problem.shape.dim;
    for (int t = 0; t < 12; ++t)
      for (int c = 0; c < row; ++c) {
        if (t == 5)
          EXPECT_FALSE(std::isfinite(result.out[t * row + c]));
        else
          EXPECT_EQ(result.out[t * row + c], clean.out[t * row + c]) << t;
      }
  }
  HostShape shape{
      .query_len = {5}, .kv_len = {200}, .mask = {.causal = true, .window = 1}, .qq = true};
  HostProblem problem(shape, fresh_seed());
  problem.qq.set(2 * (problem.qq_width() + HostProblem::kGap) + 2,
                 -std::numeric_limits<float>::infinity());
  const Result result = problem.run(*backend_);
  for (int h = 0; h < shape.heads; ++h)
    EXPECT_EQ(result.lse[2 * shape.heads + h], -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(is_close(problem.error(result)));
}

// Positions past 2^31: arithmetic only, since no memory holds that many keys.
TEST_F(HostFeatures, FarPositions) {
  for (Alibi alibi : {Alibi::context, Alibi::query}) {
    HostShape shape{.query_len = {30}, .kv_len = {300}, .mask = {.causal = true, .window = 250}};
    shape.alibi = alibi;
    shape.qq = true;
    HostProblem problem(shape, fresh_seed());
    const auto attend = [&](std::int64_t before) {
      const std::vector<std::int64_t> table = {0, before, before + 300};
      const Shard shard = Shard::ranges(before + 300, 1, 2, table.data());
      const std::int64_t rows = problem.tokens() * shape.heads;
      std::vector<std::byte> memory(kernels::StateSlots::bytes(rows, shape.dim), std::byte{0xff});
      auto p = problem.params(shard, {memory.data(), rows, shape.dim, 1}, 0);
      p.k = {problem.k.data(), problem.kv_stride(), shape.dim};
      p.v = {problem.v.data(), problem.kv_stride(), shape.dim};
      p.batch = {};
      std::vector<std::byte> scratch(backend_->attend_scratch(p) + 256);
      p.scratch = scratch.data() + (256 - reinterpret_cast<std::uintptr_t>(scratch.data()) % 256);
      p.scratch_bytes = scratch.size() - 256;
      backend_->attend(p, {});
      return memory;
    };
    EXPECT_EQ(attend(0), attend(std::int64_t{1} << 40));
  }
}

TEST_F(HostFeatures, AnyStridesOfQueries) {
  HostProblem problem({.query_len = {9}, .kv_len = {200}}, fresh_seed());
  const Result result = problem.run(*backend_);
  const int heads = problem.shape.heads, dim = problem.shape.dim;
  Array turned(fp32, heads * 11 * (dim + 3));  // [heads, 11 tokens, dim + 3]
  for (int t = 0; t < 9; ++t)
    for (int h = 0; h < heads; ++h)
      for (int c = 0; c < dim; ++c)
        turned.set((h * 11 + t) * (dim + 3) + c,
                   static_cast<float>(problem.q[t * problem.q_stride() + h * dim + c]));
  const std::int64_t rows = 9 * heads;
  std::vector<std::byte> memory(kernels::StateSlots::bytes(rows, dim), std::byte{0xff});
  const kernels::StateSlots state{memory.data(), rows, dim, 1};
  auto p = problem.params(Shard::contiguous(200, 0, 1), state, 0);
  Local local = problem.local(p.shard);
  local.give(p);
  p.q = {turned.data(), dim + 3, 11 * (dim + 3)};
  std::vector<std::byte> scratch(backend_->attend_scratch(p) + 256);
  p.scratch = scratch.data() + (256 - reinterpret_cast<std::uintptr_t>(scratch.data()) % 256);
  p.scratch_bytes = scratch.size() - 256;
  backend_->attend(p, {});
  for (std::int64_t row = 0; row < rows; ++row)
    for (int c = 0; c < dim; ++c)
      ASSERT_EQ(finish(state.stats(0)[row])(state.o(0, row)[c]), result.out[row * dim + c]);
}

// Their states are not written, nor their table entries read, which are out of range here.
TEST_F(HostFeatures, SkippedSequencesAreNotTouched) {
  HostShape shape = mixed();
  shape.page = 16;
  shape.skip_decode = true;
  HostProblem problem(shape, fresh_seed());
  const std::int64_t rows = problem.tokens() * shape.heads;
  std::vector<std::byte> memory(kernels::StateSlots::bytes(rows, shape.dim), std::byte{0xff});
  const kernels::StateSlots state{memory.data(), rows, shape.dim, 1};
  auto p = problem.params(Shard::contiguous(0, 0, 1), state, 0);
  Local local = problem.local(p.shard);
  local.give(p);
  std::vector<std::byte> scratch(backend_->attend_scratch(p) + 256);
  p.scratch = scratch.data() + (256 - reinterpret_cast<std::uintptr_t>(scratch.data()) % 256);
  p.scratch_bytes = scratch.size() - 256;
  backend_->attend(p, {});
  for (std::int64_t row = 0; row < rows; ++row) {
    const bool skipped = row / shape.heads == 37;  // the one token of the second sequence
    EXPECT_EQ(std::isnan(state.stats(0)[row].sum), skipped) << row;
    EXPECT_EQ(std::isnan(state.o(0, row)[0]), skipped) << row;
  }
}

// Products stay exact, which the option allows.
TEST_F(HostFeatures, Tf32ChangesNothing) {
  HostProblem problem({}, fresh_seed());
  auto p = problem.params(Shard::contiguous(300, 0, 1), {}, 0);
  p.tf32 = p.invariant = true;
  EXPECT_NO_THROW(backend_->check(p));
}

// The host does not round weights to e4m3, and reports it.
TEST_F(HostFeatures, Fp8ProductsAreRefused) {
  HostProblem problem({}, fresh_seed());
  auto p = problem.params(Shard::contiguous(300, 0, 1), {}, 0);
  p.fp8_products = true;
  try {
    backend_->check(p);
    FAIL() << "taken";
  } catch (const Unsupported& refusal) {
    EXPECT_NE(std::string(refusal.what()).find("fp8 products"), std::string::npos);
    EXPECT_NE(std::string(refusal.what()).find("on the host"), std::string::npos);
  }
}

}  // namespace
}  // namespace longspan::tests
