// The Hopper kernel by itself: both of its epilogues against float64, at the edges of its tiles,
// with NaN in all memory beside the keys, and the same bits from run to run. Each test draws fresh
// inputs.
#include "kernels/cuda/attend_sm90.hpp"

#include "tests/gpu/gpu_case.hpp"
#include "tests/gpu/serving_ranks.hpp"
#include "tests/grids.hpp"

namespace longspan::test {
namespace {

/// One rank that holds all keys: sequences lie apart, with NaN between them and around them.
class Sm90Run {
 public:
  Sm90Run(const Case& c, const Data& data)
      : c_(c), q_(data.q), sinks_(data.sinks), slopes_(data.slopes), causal_(c.causal) {
    constexpr std::int64_t kGap = 7;
    const std::int64_t row_bytes =
        std::int64_t{c.kv_heads} * c.dim * static_cast<std::int64_t>(size_of(c.dtype));
    std::vector<std::byte> k, v;
    std::vector<std::int64_t> key_start;
    std::vector<std::int32_t> query_start{0};
    for (std::size_t b = 0; b < c.q_lens.size(); ++b) {
      query_start.push_back(query_start.back() + c.q_lens[b]);
      for (auto* to : {&k, &v}) to->insert(to->end(), kGap * row_bytes, std::byte{0xff});
      key_start.push_back(static_cast<std::int64_t>(k.size()) / row_bytes);
      k.insert(k.end(), data.k[b].begin(), data.k[b].end());
      v.insert(v.end(), data.v[b].begin(), data.v[b].end());
    }
    k_ = OnGpu<std::byte>(k);
    v_ = OnGpu<std::byte>(v);
    key_start_ = OnGpu<std::int64_t>(key_start);
    query_start_ = OnGpu<std::int32_t>(query_start);
    kv_len_ = OnGpu<std::int32_t>(std::vector<std::int32_t>(c.kv_lens.begin(), c.kv_lens.end()));
    rows_ = c.tokens() * c.heads;
    out_ = OnGpu<std::byte>(static_cast<std::size_t>(rows_ * c.dim) * size_of(c.dtype));
    lse_ = OnGpu<float>(static_cast<std::size_t>(rows_));
    state_ = OnGpu<std::byte>(static_cast<std::size_t>(kernels::StateSlots::bytes(rows_, c.dim)));
    scratch_ = OnGpu<std::byte>(kernels::sm90::kScratchBytes);
  }

  kernels::AttendParams params() const {
    const std::int64_t row = std::int64_t{c_.kv_heads} * c_.dim;
    kernels::AttendParams p;
    p.dtype = p.q_dtype = p.kv_dtype = c_.dtype;
    p.tokens = c_.tokens();
    p.heads = c_.heads;
    p.kv_heads = c_.kv_heads;
    p.dim = c_.dim;
    p.q = {q_.data(), std::int64_t{c_.heads} * c_.dim, c_.dim};
    p.k = {k_.data(), row, c_.dim};
    p.v = {v_.data(), row, c_.dim};
    p.batch = {c_.batch(), query_start_.data(), kv_len_.data(), key_start_.data()};
    if (!c_.causal.empty()) p.batch.causal = causal_.data();
    p.mask = c_.mask;
    p.score = {c_.scale_used(), c_.softcap};
    if (c_.alibi) p.bias = {slopes_.data(), *c_.alibi};
    p.invariant = c_.invariant;
    p.state = {state_.data(), rows_, c_.dim, 1};
    p.scratch = scratch_.data();
    p.scratch_bytes = scratch_.buffer.bytes();
    return p;
  }

  /// The result as the kernel finishes it.
  Result finish() {
    poison();
    kernels::sm90::Finished finished;
    finished.out = {out_.data(), std::int64_t{c_.heads} * c_.dim, c_.dim};
    finished.lse = lse_.data();
    finished.lse_row_stride = c_.heads;
    finished.lse_head_stride = 1;
    finished.sinks = c_.sinks ? sinks_.data() : nullptr;
    kernels::sm90::attend(params(), finished, 0, nullptr);
    return result();
  }

  /// The result out of the state that the kernel writes.
  Result merge() {
    poison();
    kernels::sm90::attend(params(), {}, 0, nullptr);
    kernels::MergeParams m;
    m.states = params().state;
    m.heads = c_.heads;
    m.sinks = c_.sinks ? sinks_.data() : nullptr;
    m.tokens = c_.tokens();
    m.dtype = c_.dtype;
    m.out = {out_.data(), std::int64_t{c_.heads} * c_.dim, c_.dim};
    m.lse = lse_.data();
    m.lse_row_stride = c_.heads;
    m.lse_head_stride = 1;
    kernels::cuda_backend()->merge(m, {});
    return result();
  }

  std::vector<std::byte> state() const { return state_.values(state_.buffer.bytes()); }

 private:
  void poison() {
    out_.poison();
    lse_.poison();
    state_.poison();
    scratch_.poison();
  }
  Result result() const {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return {out_.values(out_.buffer.bytes()), lse_.values(static_cast<std::size_t>(rows_))};
  }

  Case c_;
  std::int64_t rows_ = 0;
  OnGpu<std::byte> q_, k_, v_, out_, state_, scratch_;
  OnGpu<float> sinks_, slopes_, lse_;
  OnGpu<std::uint8_t> causal_;
  OnGpu<std::int64_t> key_start_;
  OnGpu<std::int32_t> query_start_, kv_len_;
};

void check(const Case& c, const Data& data, int stride) {
  Sm90Run run(c, data);
  ASSERT_TRUE(kernels::sm90::accepts(run.params())) << c;
  expect_within_rounding(c, data, run.finish(), stride);
  expect_within_rounding(c, data, run.merge(), stride);
}

void check(const Case& c, int stride = 1) { check(c, Data(c), stride); }

/// Adds about `by` to every scaled product: one element of each query and key is a constant.
void shift_products(const Case& c, Data& data, float by) {
  const float root = std::sqrt(std::abs(by) / c.scale_used());
  const auto set = [&](std::vector<std::byte>& rows, float value) {
    const auto count = static_cast<std::int64_t>(rows.size() / size_of(c.dtype));
    for (std::int64_t at = 0; at < count; at += c.dim)
      launcher::store(rows.data(), c.dtype, at, value);
  };
  set(data.q, root);
  for (auto& k : data.k) set(k, std::copysign(root, by));
}

/// Query rows of three sizes, in turn.
void mix_rows(const Case& c, Data& data) {
  const std::int64_t row = std::int64_t{c.heads} * c.dim;
  for (std::int64_t at = 0; at < c.tokens() * row; ++at) {
    const double value = launcher::load(data.q.data(), c.dtype, at);
    launcher::store(data.q.data(), c.dtype, at,
                    static_cast<float>(std::ldexp(value, -2 * static_cast<int>(at / row % 3))));
  }
}

/// The largest magnitude of a scaled product of the one sequence.
double largest_product(const Case& c, const Data& data) {
  double largest = 0;
  const int group = c.heads / c.kv_heads;
  for (int kv_head = 0; kv_head < c.kv_heads; ++kv_head) {
    const launcher::RowMajor keys = matrix_of(c, data.k[0], c.kv_lens[0], kv_head);
    for (std::int64_t t = 0; t < c.tokens(); ++t)
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        Eigen::VectorXd q(c.dim);
        for (int d = 0; d < c.dim; ++d)
          q[d] = launcher::load(data.q.data(), c.dtype, (t * c.heads + head) * c.dim + d);
        largest = std::max(largest, (keys * q).cwiseAbs().maxCoeff() * c.scale_used());
      }
  }
  return largest;
}

const DType kTypes[] = {DType::bf16, DType::fp16};

TEST(AttendSm90, EveryHeadDim) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (int dim : {48, 64, 72, 80, 88, 96, 120, 128, 136, 192, 200, 256})
      check({.dtype = dtype,
             .heads = 4,
             .kv_heads = 2,
             .dim = dim,
             .q_lens = {130},
             .kv_lens = {333},
             .mask = {.causal = true},
             .seed = fresh_seed()},
            3);
}

// Rows come in tiles of 128 and 192, keys in tiles of 80, 112, 128 and 160.
TEST(AttendSm90, EdgesOfTiles) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 80, 128, 192, 256})
    for (int q_len : {1, 64, 127, 128, 129, 192, 193})
      for (int kv_len : {1, 79, 80, 112, 127, 128, 129, 160, 161, 321})
        for (bool causal : {false, true})
          check({.heads = 1,
                 .kv_heads = 1,
                 .dim = dim,
                 .q_lens = {q_len},
                 .kv_lens = {kv_len},
                 .mask = {.causal = causal},
                 .sinks = kv_len % 2 == 0,
                 .seed = fresh_seed()},
                5);
}

TEST(AttendSm90, EveryMaskInUnevenBatches) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 80, 96, 128, 192, 256})
    for (const Mask& mask : kMasks)
      check({.heads = 3,
             .kv_heads = 1,
             .dim = dim,
             .q_lens = {200, 1, 0, 300, 17, 40},
             .kv_lens = {200, 500, 30, 64, 900, 0},
             .mask = mask,
             .sinks = true,
             .seed = fresh_seed()},
            7);
}

// Scores large enough that rows' origins move again and again.
TEST(AttendSm90, GrowingScores) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (float scale : {0.3f, 2.0f, 20.0f})
      check({.dtype = dtype,
             .heads = 2,
             .kv_heads = 1,
             .dim = 64,
             .q_lens = {150},
             .kv_lens = {1500},
             .scale = scale,
             .seed = fresh_seed()},
            11);
}

// Far from the cap, near it on both sides of the kernel's bound, and far beyond; within a tile too.
TEST(AttendSm90, Softcap) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (int dim : {64, 72, 96, 128, 192, 256})
      for (float softcap : {0.001f, 0.5f, 2.0f, 5.0f, 50.0f, 3e4f, 1e9f})
        check({.dtype = dtype,
               .heads = 4,
               .kv_heads = 2,
               .dim = dim,
               .q_lens = {130},
               .kv_lens = {433},
               .mask = {.causal = softcap != 2.0f, .window = softcap == 5.0f ? 150 : 0},
               .softcap = softcap,
               .sinks = dim % 64 == 0,
               .seed = fresh_seed()},
              7);
}

// The lse of a row with few keys shows what a cap costs in precision: there is nothing to average.
TEST(AttendSm90, SoftcapOfSmallScores) {
  LONGSPAN_NEEDS_HOPPER();
  for (float scale : {1e-5f, 0.01f, 0.1f})
    for (float softcap : {1.0f, 50.0f, 1000.0f})
      check({.dtype = DType::fp16,
             .heads = 2,
             .kv_heads = 1,
             .dim = 64,
             .q_lens = {150},
             .kv_lens = {150},
             .mask = {.causal = true, .window = 2},
             .softcap = softcap,
             .scale = scale,
             .seed = fresh_seed()});
}

// Each form of the cap on both sides of where it ends: 0.1875, 0.6 and 2.5 of the cap. Scores are
// so large that a row's largest, where a form that does not reach is furthest off, have the weight.
// Products on both sides of 0, all above and all below; rows of the warp alike, and of three sizes.
TEST(AttendSm90, FormsOfTheCap) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (int dim : {64, 128, 256})
      for (double reach : {0.1, 0.17, 0.2, 0.3, 0.55, 0.65, 1.0, 2.3, 2.7, 5.0, 30.0})
        for (float shift : {0.0f, -60.0f, 60.0f})
          for (const std::optional<Alibi> alibi :
               {std::optional<Alibi>{}, std::optional{Alibi::query}}) {
            const bool mixed = shift == 0.0f;
            Case c{.dtype = dtype,
                   .heads = 2,
                   .kv_heads = 1,
                   .dim = dim,
                   .q_lens = {201},
                   .kv_lens = {650},
                   .mask = {.causal = reach != 0.3},
                   .softcap = 1.0f,
                   .alibi = alibi,
                   .scale = 8.0f / static_cast<float>(dim),
                   .seed = fresh_seed()};
            Data data(c);
            if (shift != 0.0f) shift_products(c, data, shift);
            if (mixed && reach < 1.0) mix_rows(c, data);
            c.softcap = static_cast<float>(largest_product(c, data) / reach);
            check(c, data, 7);
          }
}

// What a row sees of keys beside its warp's others, or of rows that do not exist, does not change
// how its own are capped: items that end inside a warp, with large rows of another sequence behind.
TEST(AttendSm90, FormsOfTheCapBesideOtherRows) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 128})
    for (int rows : {1, 5, 8, 9, 70, 77}) {
      Case c{.heads = 1,
             .kv_heads = 1,
             .dim = dim,
             .q_lens = {rows, 90},
             .kv_lens = {400, 400},
             .softcap = 40.0f,
             .seed = fresh_seed()};
      Data data(c);
      const Result small = Sm90Run(c, data).finish();
      const auto from = static_cast<std::int64_t>(rows) * dim;
      for (std::int64_t at = from; at < c.tokens() * dim; ++at)
        launcher::store(data.q.data(), c.dtype, at,
                        static_cast<float>(64 * launcher::load(data.q.data(), c.dtype, at)));
      const Result large = Sm90Run(c, data).finish();
      for (std::size_t row = 0; row < static_cast<std::size_t>(rows); ++row)
        EXPECT_EQ(small.lse[row], large.lse[row]) << c << " row " << row;
      check(c, data, 3);
    }
}

TEST(AttendSm90, Alibi) {
  LONGSPAN_NEEDS_HOPPER();
  const Mask masks[] = {{}, {.causal = true}, {.causal = true, .window = 100}, {.right = 40}};
  for (const DType dtype : kTypes)
    for (int dim : {64, 80, 96, 128, 192, 256})
      for (const Alibi alibi : {Alibi::context, Alibi::query})
        for (const Mask& mask : masks)
          for (float softcap : {0.0f, 5.0f})
            check({.dtype = dtype,
                   .heads = 6,
                   .kv_heads = 2,
                   .dim = dim,
                   .q_lens = {200, 1, 0, 300, 17, 40},
                   .kv_lens = {200, 500, 30, 64, 900, 0},
                   .mask = mask,
                   .softcap = softcap,
                   .alibi = alibi,
                   .sinks = softcap == 0,
                   .seed = fresh_seed()},
                  23);
}

// Distances so large that only a few keys have weight, from a first query far behind the first key.
TEST(AttendSm90, AlibiOfManyKeys) {
  LONGSPAN_NEEDS_HOPPER();
  for (const Alibi alibi : {Alibi::context, Alibi::query})
    for (bool causal : {false, true})
      check({.heads = 4,
             .kv_heads = 1,
             .dim = 128,
             .q_lens = {300},
             .kv_lens = {9000},
             .mask = {.causal = causal},
             .alibi = alibi,
             .seed = fresh_seed()},
            41);
}

// Tiles far from the rows on both sides, and scores of the sign that their bias does not suggest.
TEST(AttendSm90, AlibiFarFromTheRows) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : kTypes)
    for (int dim : {64, 80, 128, 256})
      for (const Alibi alibi : {Alibi::context, Alibi::query})
        for (bool causal : {false, true})
          for (float shift : {0.0f, -40.0f, 40.0f}) {
            if (shift != 0.0f && alibi == Alibi::context) continue;  // lse would cancel to nearly 0
            const Case c{.dtype = dtype,
                         .heads = 8,
                         .kv_heads = 1,
                         .dim = dim,
                         .q_lens = {1300},
                         .kv_lens = {1500},
                         .mask = {.causal = causal},
                         .softcap = shift == 0.0f && !causal ? 30.0f : 0.0f,
                         .alibi = alibi,
                         .seed = fresh_seed()};
            Data data(c);
            if (shift != 0.0f) shift_products(c, data, shift);
            check(c, data, 91);
          }
}

TEST(AttendSm90, CausalFlags) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 128})
    for (const std::optional<Alibi> alibi : {std::optional<Alibi>{}, std::optional{Alibi::query}})
      check({.heads = 2,
             .kv_heads = 1,
             .dim = dim,
             .q_lens = {200, 140, 0, 1, 70},
             .kv_lens = {300, 140, 30, 64, 700},
             .causal = {1, 0, 1, 0, 0},
             .alibi = alibi,
             .seed = fresh_seed()},
            9);
}

// A NaN that a row sees stays NaN, and the other rows are as if it were not there.
TEST(AttendSm90, NanStaysNan) {
  LONGSPAN_NEEDS_HOPPER();
  for (float softcap : {0.0f, 0.5f, 50.0f})
    for (const std::optional<Alibi> alibi : {std::optional<Alibi>{}, std::optional{Alibi::query}}) {
      Case c{.heads = 2,
             .kv_heads = 1,
             .dim = 64,
             .q_lens = {200},
             .kv_lens = {200},
             .mask = {.causal = true},
             .softcap = softcap,
             .alibi = alibi,
             .seed = fresh_seed()};
      SCOPED_TRACE(::testing::Message() << c);
      Data data(c);
      const Result clean = Sm90Run(c, data).finish();
      constexpr int kBad = 150;
      const auto row = static_cast<std::int64_t>(c.dim * size_of(c.dtype));
      std::fill_n(data.k[0].begin() + kBad * row, row, std::byte{0xff});
      const Result found = Sm90Run(c, data).finish();
      for (std::size_t at = 0; at < found.lse.size(); ++at) {
        if (at / c.heads < kBad)
          EXPECT_EQ(found.lse[at], clean.lse[at]) << at;
        else
          EXPECT_TRUE(std::isnan(found.lse[at])) << at;
      }
    }
}

// What a rank's shard, a batch and documents decide; NaN wherever no row may look.
TEST(AttendSm90, Shards) {
  LONGSPAN_NEEDS_HOPPER();
  struct Cut {
    Layout layout;
    std::int64_t block = kSegment;
  };
  for (const Cut& cut :
       {Cut{Layout::contiguous}, Cut{Layout::ranges}, Cut{Layout::zigzag}, Cut{Layout::striped},
        Cut{Layout::interleaved, 1}, Cut{Layout::interleaved, 16}, Cut{Layout::interleaved, 128},
        Cut{Layout::interleaved, 1000}})
    for (const int ranks : {1, 2, 3})
      for (const bool causal : {false, true})
        for (const std::optional<Alibi> alibi :
             {std::optional<Alibi>{}, std::optional{Alibi::context}, std::optional{Alibi::query}}) {
          testing::Serving s{.heads = 6,
                             .dim = ranks == 2 ? 256 : 128,
                             .dtype = DType::bf16,
                             .q_lens = {300, 40, 170, 20},
                             .kv_lens = {3000, 130, 170, 20},
                             .page = 0};
          s.mask = {.causal = causal, .window = ranks == 3 ? 700 : 0};
          s.alibi = alibi;
          s.softcap = ranks == 2 ? 20.0f : 0.0f;
          s.sinks = true;
          testing::check_dealt(
              s, {.layout = cut.layout, .ranks = ranks, .block = cut.block, .on_hopper = true});
        }
}

TEST(AttendSm90, DocumentsAndLeftOutDecodes) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int ranks : {1, 2})
    for (const std::optional<Alibi> alibi :
         {std::optional<Alibi>{}, std::optional{Alibi::context}, std::optional{Alibi::query}})
      for (const bool causal : {false, true}) {
        for (const std::vector<std::int64_t>& documents :
             {std::vector<std::int64_t>{0, 300, 301, 620, 700},
              std::vector<std::int64_t>{40, 300, 600, 690}})
          for (const int q_len : {150, 700}) {
            testing::Serving s{
                .dtype = DType::bf16, .q_lens = {q_len}, .kv_lens = {700}, .page = 0};
            s.mask.causal = causal;
            s.alibi = alibi;
            s.documents = documents;
            testing::check_dealt(s, {.ranks = ranks, .on_hopper = true});
          }
        testing::Serving s{.dtype = DType::bf16,
                           .q_lens = {150, 1, 40, 5, 1},
                           .kv_lens = {700, 130, 333, 20, 41},
                           .causal = {1, 0, 0, 1, 1},
                           .page = 0};
        s.alibi = alibi;
        s.skip_decode = causal;
        testing::check_dealt(s, {.ranks = ranks, .on_hopper = true});
      }
}

// Pages are brought together first; then the sequence's context and its new rows are one.
TEST(AttendSm90, ChunkedPrefill) {
  LONGSPAN_NEEDS_HOPPER();
  const Kernels kernels(Device::cuda);
  for (const DType dtype : kTypes)
    for (const std::optional<Alibi> alibi :
         {std::optional<Alibi>{}, std::optional{Alibi::context}, std::optional{Alibi::query}})
      for (const float softcap : {0.0f, 10.0f})
        for (const bool skip : {false, true}) {
          testing::Serving s{.dim = 96,
                             .dtype = dtype,
                             .q_lens = {65, 1, 330, 4, 0},
                             .kv_lens = {900, 600, 330, 90, 40},
                             .softcap = softcap,
                             .alibi = alibi,
                             .sinks = true,
                             .skip_decode = skip,
                             .x_packed = skip,
                             .separate_new = true};
          if (softcap != 0) s.causal = {1, 1, 0, 1, 1};
          const unsigned seed = fresh_seed();
          SCOPED_TRACE(testing::describe(s) + " seed " + std::to_string(seed));
          const testing::ServingProblem problem(s, seed);
          testing::expect_right(problem, testing::run_context(kernels, Device::cuda, problem),
                                problem.tolerance(), 12);
        }
}

TEST(AttendSm90, SameBitsFromRunToRun) {
  LONGSPAN_NEEDS_HOPPER();
  for (int dim : {64, 128, 256}) {
    const Case c{.heads = 8,
                 .kv_heads = 2,
                 .dim = dim,
                 .q_lens = {2000, 700},
                 .kv_lens = {3000, 700},
                 .mask = {.causal = true},
                 .seed = fresh_seed()};
    const Data data(c);
    Sm90Run run(c, data);
    const Result first = run.finish();
    run.merge();
    const std::vector<std::byte> state = run.state();
    for (int again = 0; again < 5; ++again) {
      const Result next = run.finish();
      EXPECT_EQ(next.out, first.out) << c;
      EXPECT_EQ(next.lse, first.lse) << c;
      run.merge();
      EXPECT_EQ(run.state(), state) << c;
    }
  }
}

// The rows of a sequence take a kernel by its own length, so a launch leaves the others alone.
TEST(AttendSm90, ShortSequencesAreNotTouched) {
  LONGSPAN_NEEDS_HOPPER();
  const Case c{.dim = 64, .q_lens = {3, 50, 16}, .kv_lens = {90, 90, 90}, .seed = fresh_seed()};
  const Data data(c);
  Sm90Run run(c, data);
  kernels::AttendParams p = run.params();
  run.merge();
  OnGpu<std::byte> state(run.state().size());
  p.state.data = state.data();
  kernels::sm90::attend(p, {}, 17, nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<std::byte> all = run.state(), some = state.values(all.size());
  for (std::int64_t row = 0; row < p.state.rows; ++row) {
    const std::int64_t token = row / c.heads;
    const bool taken = token >= 3 && token < 53;
    for (std::int64_t i = 0; i < 8; ++i)
      EXPECT_EQ(some[static_cast<std::size_t>(row * 8 + i)],
                taken ? all[static_cast<std::size_t>(row * 8 + i)] : std::byte{0xff});
  }
}

TEST(AttendSm90, AcceptsByName) {
  LONGSPAN_NEEDS_HOPPER();
  const Case c{.dim = 64, .q_lens = {20}, .kv_lens = {20}};
  const Data data(c);
  const kernels::AttendParams good = Sm90Run(c, data).params();
  EXPECT_TRUE(kernels::sm90::accepts(good));
  const auto refuses = [&](auto change) {
    kernels::AttendParams p = good;
    change(p);
    return !kernels::sm90::accepts(p);
  };
  EXPECT_TRUE(refuses([](auto& p) { p.dtype = p.q_dtype = p.kv_dtype = DType::fp32; }));
  EXPECT_TRUE(refuses([](auto& p) { p.dim = 40; }));
  EXPECT_FALSE(refuses([](auto& p) { p.score.softcap = 30; }));
  EXPECT_FALSE(refuses([](auto& p) { p.bias.slopes = Floats(p.q.data, DType::fp32); }));
  EXPECT_TRUE(refuses([](auto& p) { p.score.scale = -1; }));
  EXPECT_TRUE(refuses([](auto& p) { p.invariant = true; }));
  EXPECT_TRUE(refuses([](auto& p) { p.shard.layout = Layout::listed; }));
  EXPECT_TRUE(refuses([](auto& p) { p.pages.table = p.batch.kv_len; }));
  EXPECT_TRUE(refuses([](auto& p) { p.kv_dtype = DType::e4m3; }));
  EXPECT_TRUE(refuses([](auto& p) { p.q_dtype = DType::e5m2; }));
  EXPECT_TRUE(refuses([](auto& p) { p.k.dim_stride = 16; }));
  EXPECT_TRUE(refuses([](auto& p) { p.v_scale.data = static_cast<float*>(p.q.data); }));
  EXPECT_TRUE(refuses([](auto& p) { p.bias.qq.values = Floats(p.q.data, DType::fp32); }));
  EXPECT_FALSE(refuses([](auto& p) { p.documents.start = p.batch.key_start; }));
  EXPECT_FALSE(refuses([](auto& p) { p.batch.causal = static_cast<std::uint8_t*>(p.q.data); }));
  EXPECT_FALSE(refuses([](auto& p) { p.batch.skip_decode = true; }));
  EXPECT_FALSE(refuses([](auto& p) { p.shard.layout = Layout::ranges; }));
  EXPECT_TRUE(refuses([](auto& p) { p.parts.count = 4; }));
  EXPECT_TRUE(refuses([](auto& p) { p.q.row_stride += 1; }));
}

}  // namespace
}  // namespace longspan::test
