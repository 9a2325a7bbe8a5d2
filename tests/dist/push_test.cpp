// States that are pushed by the kernel that folds them (an exchange as the epilogue of attention),
// one GPU a rank: the bits of attention and exchange in separate kernels, also where some ranks use
// one way and some the other; replays with random delays, and the ends of waits.
// LONGSPAN_SOAK=1000000 makes the soak long; LONGSPAN_TIME=1 prints what several GPUs add to the
// step of one.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/backend.hpp"
#include "kernels/cuda/dispatch/attend_finished.hpp"
#include "kernels/cuda/exchange/exchange.hpp"
#include "launcher/bench/graph.hpp"
#include "longspan/buffer.hpp"
#include "tests/dist/on_peer_buffers.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/message.hpp"
#include "tests/support/simulated.hpp"

namespace longspan::tests {
namespace {

using kernels::AttendParams;
using kernels::ExchangeParams;
using kernels::KvRows;
using kernels::MergeParams;
using kernels::Push;
using launcher::Graph;

Buffer on_gpu(const void* bytes, std::size_t count) {
  Buffer buffer(Device::cuda, count);
  buffer.upload(bytes);
  return buffer;
}

Buffer poisoned(std::size_t bytes) {
  return on_gpu(std::vector<unsigned char>(bytes, 0xA5).data(), bytes);
}

void poison(Buffer& buffer) {
  buffer.upload(std::vector<unsigned char>(buffer.bytes(), 0xA5).data());
}

/// Elements in [-1, 1).
Buffer random_elements(DType dtype, std::int64_t count, std::uint64_t seed) {
  constexpr std::int64_t kPattern = 1 << 20;
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<float> pattern(std::min(count, kPattern));
  for (float& x : pattern) x = static_cast<float>(random()) * 0x1p-31f - 1;
  const std::size_t size = size_of(dtype);  // 4, or 2 for bf16: the upper half of an fp32
  std::vector<std::byte> elements(std::max<std::int64_t>(count, 1) * size);
  for (std::int64_t i = 0; i < count; ++i)
    std::memcpy(&elements[i * size],
                reinterpret_cast<const std::byte*>(&pattern[i % kPattern]) + 4 - size, size);
  return on_gpu(elements.data(), elements.size());
}

struct Case {
  std::vector<std::int32_t> q_lens{1}, kv_lens{1000};  // of the sequences
  std::int64_t tokens = 0;  // rows of q, more than the queries; 0: as many
  int heads = 5;
  int kv_heads = 1;
  int dim = 128;
  DType dtype = DType::bf16;
  Layout layout = Layout::contiguous;
  bool sinks = false;
};

/// Attention over a rank's share of such a batch, its keys being random, and the end of the rows.
class Step {
 public:
  static constexpr std::size_t kCanary = 256;

  Step(const Case& c, int rank, int ranks, std::uint64_t seed) : case_(c), rank_(rank) {
    const int batch = static_cast<int>(c.q_lens.size());
    std::vector<std::int32_t> start(batch + 1, 0);
    std::partial_sum(c.q_lens.begin(), c.q_lens.end(), start.begin() + 1);
    tokens_ = std::max<std::int64_t>(c.tokens, start.back());
    shard_ = {c.layout, rank, ranks, c.kv_lens[0]};
    std::int64_t pitch = 1;
    for (const std::int32_t n : c.kv_lens) pitch = std::max(pitch, shard_.local_len(n));
    q_ = random_elements(c.dtype, tokens_ * c.heads * c.dim, seed);
    const std::int64_t keys = batch * pitch * c.kv_heads * c.dim;
    k_ = random_elements(c.dtype, keys, seed + 1000 + rank);
    v_ = random_elements(c.dtype, keys, seed + 2000 + rank);
    start_ = on_gpu(start.data(), start.size() * 4);
    kv_len_ = on_gpu(c.kv_lens.data(), c.kv_lens.size() * 4);
    sinks_ = random_elements(DType::fp32, c.heads, seed + 1);
    states = poisoned(
        static_cast<std::size_t>(kernels::StateSlots::bytes(rows(), c.dim) * std::max(ranks, 1)));
    const int zero = 0;
    ticket_ = on_gpu(&zero, sizeof zero);

    attend_.dtype = attend_.q_dtype = attend_.kv_dtype = c.dtype;
    attend_.tokens = tokens_;
    attend_.heads = c.heads;
    attend_.kv_heads = c.kv_heads;
    attend_.head_dim = attend_.value_dim = c.dim;
    attend_.q = {q_.data(), std::int64_t{c.heads} * c.dim, c.dim};
    attend_.k = KvRows(k_.data(), std::int64_t{c.kv_heads} * c.dim, c.dim);
    attend_.v = KvRows(v_.data(), std::int64_t{c.kv_heads} * c.dim, c.dim);
    if (batch > 1 || tokens_ > start.back()) {
      attend_.batch.size = batch;
      attend_.batch.query_start = static_cast<const std::int32_t*>(start_.data());
      attend_.batch.kv_len = static_cast<const std::int32_t*>(kv_len_.data());
      attend_.batch.key_pitch = pitch;
    }
    attend_.shard = shard_;
    attend_.mask.causal = true;
    attend_.score.scale = 1 / std::sqrt(static_cast<float>(c.dim));
    attend_.max_kv_len = *std::max_element(c.kv_lens.begin(), c.kv_lens.end());
    attend_.max_query_len = *std::max_element(c.q_lens.begin(), c.q_lens.end());
    attend_.state = {static_cast<std::byte*>(states.data()), rows(), c.dim, ranks};
    attend_.slot = rank;
    attend_.ticket = static_cast<int*>(ticket_.data());
  }

  std::int64_t rows() const { return tokens_ * case_.heads; }

  void take_scratch(const kernels::Backend& backend) {
    scratch_ = poisoned(backend.attend_scratch(attend_));
    attend_.scratch = static_cast<std::byte*>(scratch_.data());
    attend_.scratch_bytes = scratch_.bytes();
  }
  const AttendParams& attend() const { return attend_; }

  struct Result {
    Buffer out, lse;
    std::vector<std::byte> bits() const {
      std::vector<std::byte> all(out.bytes() + lse.bytes());
      out.download(all.data());
      lse.download(all.data() + out.bytes());
      return all;
    }
  };
  Result result() const {
    return {
        poisoned(static_cast<std::size_t>(rows() * case_.dim) * size_of(case_.dtype) + 2 * kCanary),
        poisoned(static_cast<std::size_t>(rows()) * 4 + 2 * kCanary)};
  }

  MergeParams merge(const Result& to) const {
    MergeParams m;
    m.states = attend_.state;
    m.interleaved = case_.layout == Layout::interleaved;
    m.heads = case_.heads;
    if (case_.sinks) m.sinks = static_cast<const float*>(sinks_.data());
    m.batch = attend_.batch;
    m.tokens = tokens_;
    m.dtype = case_.dtype;
    m.out = {static_cast<std::byte*>(to.out.data()) + kCanary,
             std::int64_t{case_.heads} * case_.dim, case_.dim};
    m.lse = {reinterpret_cast<float*>(static_cast<std::byte*>(to.lse.data()) + kCanary),
             case_.heads, 1};
    return m;
  }

  Buffer states;

 private:
  Case case_;
  int rank_;
  std::int64_t tokens_ = 0;
  Shard shard_;
  Buffer q_, k_, v_, start_, kv_len_, sinks_, ticket_, scratch_;
  AttendParams attend_;
};

/// Keys are split where the GPU has room for the pieces: a simulated one has fewer multiprocessors
/// (tests/dist/CMakeLists.txt).
constexpr int kManyHeads = kSimulated ? 4 : 8;

class PushTest : public OnPeerBuffers {
 protected:
  Step step_of(const Case& c, std::uint64_t seed) {
    Step step(c, world_->rank(), world_->size(), seed);
    step.take_scratch(*backend_);
    return step;
  }

  void apart(const Step& step, const ExchangeParams& e) {
    backend_->attend(step.attend(), Stream{stream_});
    kernels::cuda::exchange(e, stream_);
  }

  void check(const Case& c, std::uint64_t seed);
};

/// In separate kernels, then pushed, with many blocks and with few, with the first results poisoned
/// in between.
void PushTest::check(const Case& c, std::uint64_t seed) {
  Step step = step_of(c, seed);
  auto peer_buffers = open(*world_, step.rows(), c.dim);
  ASSERT_TRUE(peer_buffers);
  const Step::Result expected = step.result();
  const auto shape = static_cast<std::uint32_t>(seed);
  apart(step, {peer_buffers->view(), step.merge(expected), step.rows(), shape, Push::one_trip});
  ok(cudaStreamSynchronize(stream_));
  ASSERT_EQ(peer_buffers->report().kind, PeerReport::none)
      << "rank " << peer_buffers->report().rank;
  for (const int blocks : {0, 3, 1}) {
    if (kSimulated && blocks == 1) continue;  // time
    const Step::Result found = step.result();
    poison(step.states);
    step.take_scratch(*backend_);
    ASSERT_TRUE(backend_->attend(step.attend(),
                                 ExchangeParams{peer_buffers->view(), step.merge(found),
                                                step.rows(), shape, Push::one_trip, blocks},
                                 Stream{stream_}));
    ok(cudaStreamSynchronize(stream_));
    ASSERT_EQ(peer_buffers->report().kind, PeerReport::none)
        << "rank " << peer_buffers->report().rank;
    EXPECT_TRUE(found.bits() == expected.bits())
        << "other bits: dim " << c.dim << ", rows " << step.rows() << ", keys " << c.kv_lens[0]
        << ", sequences " << c.q_lens.size() << ", blocks " << blocks << ", " << name(c.layout);
  }
}

/// By size, states that attention pushes take one trip where separate kernels take two.
TEST_F(PushTest, OneTripForLonger) {
  Case c{.q_lens = std::vector<std::int32_t>(16, 1),
         .kv_lens = std::vector<std::int32_t>(16, (kSimulated ? 1024 : 4096) * world_->size()),
         .heads = 64,
         .kv_heads = kManyHeads};
  Step step = step_of(c, shared_seed(*world_));
  auto peer_buffers = open(*world_, step.rows(), c.dim);
  ASSERT_TRUE(peer_buffers);
  const Step::Result expected = step.result(), found = step.result();
  ExchangeParams e{peer_buffers->view(), step.merge(expected), step.rows(), 1};
  apart(step, e);
  ok(cudaStreamSynchronize(stream_));
  e.merge = step.merge(found);
  EXPECT_TRUE(kernels::cuda::is_decode(step.attend()));
  ASSERT_TRUE(backend_->attend(step.attend(), e, Stream{stream_}));
  ok(cudaStreamSynchronize(stream_));
  ASSERT_EQ(peer_buffers->report().kind, PeerReport::none)
      << "rank " << peer_buffers->report().rank;
  EXPECT_TRUE(found.bits() == expected.bits());
}

/// From 2 splits of a rank's keys to as many as there can be.
TEST_F(PushTest, BitsOfKernelsOfTheirOwn) {
  const std::uint64_t seed = shared_seed(*world_);
  const int ranks = world_->size();
  int turn = 0;
  for (int dim : {8, 16, 24, 64, 80, 128, 256, 264, 512})
    for (std::int32_t keys : {256, 512, 1000, 2048, 9000, 40000}) {
      const Layout layout = ++turn % 2 == 0 ? Layout::contiguous : Layout::interleaved;
      if (kSimulated && keys > 1000 && dim > 24) continue;  // time
      check({.kv_lens = {keys * ranks}, .dim = dim, .layout = layout, .sinks = turn % 3 == 0},
            seed + turn);
    }
}

TEST_F(PushTest, BitsInBatches) {
  const std::uint64_t seed = shared_seed(*world_);
  const int ranks = world_->size();
  const std::vector<Case> cases{
      // No keys at all, none on most ranks, more queries than keys.
      {.q_lens = {1, 2, 5, 1, 3}, .kv_lens = {5000, 0, 1, 700, 2}},
      {.q_lens = {4, 1}, .kv_lens = {130, 3000}, .heads = 6, .kv_heads = 2, .sinks = true},
      // Rows of q that no sequence has; with this many, parts are laid out by sequence.
      {.q_lens = {1, 3}, .kv_lens = {4000, 900}, .tokens = 9},
      {.q_lens = {1, 3, 16},
       .kv_lens = {400, 3000, 20},
       .tokens = 77,
       .heads = 3,
       .kv_heads = kSimulated ? 1 : 3},
      {.q_lens = {0, 2, 0}, .kv_lens = {10, 3000, 600}, .tokens = 60},
      // More rows than blocks.
      {.q_lens = std::vector<std::int32_t>(kSimulated ? 8 : 16, 1),
       .kv_lens = kSimulated ? std::vector<std::int32_t>(8, 1100 * ranks)
                             : std::vector<std::int32_t>(16, 3000),
       .heads = 64,
       .kv_heads = kManyHeads},
      {.q_lens = {7, 7, 7},
       .kv_lens = {2000, 1999, 3},
       .heads = kSimulated ? 3 : 33,
       .kv_heads = 1,
       .dim = 96},
      {.q_lens = {1, 4}, .kv_lens = {3000, 200}, .dim = 64, .dtype = DType::fp32},
  };
  for (std::size_t i = 0; i < cases.size(); ++i)
    for (const Layout layout : {Layout::contiguous, Layout::interleaved}) {
      if (kSimulated && (i + seed + (layout == Layout::contiguous)) % 2 == 0) continue;  // time
      SCOPED_TRACE("case " + std::to_string(i) + ", seed " + std::to_string(seed));
      Case c = cases[i];
      c.layout = layout;
      check(c, seed + i);
    }
}

/// Other steps keep their own way, and nothing is queued for this one.
TEST_F(PushTest, LeavesTheRestToOtherKernels) {
  const Case c{.kv_lens = {3000}};
  Step step = step_of(c, 1);
  auto peer_buffers = open(*world_, step.rows(), c.dim);
  ASSERT_TRUE(peer_buffers);
  const auto is_decode = [&](const auto& change) {
    AttendParams p = step.attend();
    change(p);
    return kernels::cuda::is_decode(p);
  };
  EXPECT_TRUE(is_decode([](AttendParams&) {}));
  EXPECT_FALSE(is_decode([](AttendParams& p) { p.resume = true; }));
  EXPECT_FALSE(is_decode([](AttendParams& p) { p.parts.count = 2; }));
  EXPECT_FALSE(is_decode([](AttendParams& p) { p.batch.skip_decode = true; }));
  for (const bool splits : {true, false}) {
    const Step::Result expected = step.result(), found = step.result();
    AttendParams p = step.attend();
    if (!splits) p.shard.length = 100;
    ExchangeParams e{peer_buffers->view(), step.merge(expected), step.rows(), 1,
                     splits ? Push::two_trips : Push::one_trip};
    backend_->attend(p, Stream{stream_});
    backend_->exchange(e, Stream{stream_});
    e.merge = step.merge(found);
    EXPECT_FALSE(backend_->attend(p, e, Stream{stream_}));
    ok(cudaStreamSynchronize(stream_));
    EXPECT_EQ(peer_buffers->report().kind, PeerReport::none);
    EXPECT_TRUE(found.bits() == expected.bits()) << splits;
  }
}

/// Ranks use both ways in turn, no two neighbours the same; two steps with other queries, so that a
/// word left by an earlier exchange would be a wrong one. The epoch wraps.
TEST_F(PushTest, SoakWithDelaysAndRanksThatDiffer) {
  const char* asked = std::getenv("LONGSPAN_SOAK");
  const long epochs = asked ? std::atol(asked) : kSimulated ? 20 : 4000;
  constexpr int kBatch = kSimulated ? 10 : 50;
  const std::uint64_t seed = shared_seed(*world_);
  const Case c{.q_lens = {1, 2}, .kv_lens = {2000, 400}, .heads = 15, .kv_heads = 5};  // 45 rows
  Step steps[] = {step_of(c, seed), step_of(c, seed + 1)};
  auto peer_buffers = open(*world_, steps[0].rows(), c.dim);
  ASSERT_TRUE(peer_buffers);
  const Step::Result expected[] = {steps[0].result(), steps[1].result()};
  const Step::Result found[] = {steps[0].result(), steps[1].result()};
  const PeerView view = peer_buffers->view();
  for (int i = 0; i < 2; ++i) {
    apart(steps[i], {view, steps[i].merge(expected[i]), steps[i].rows(), 1, Push::one_trip});
    ASSERT_TRUE(backend_->attend(
        steps[i].attend(),
        ExchangeParams{view, steps[i].merge(found[i]), steps[i].rows(), 1, Push::one_trip},
        Stream{stream_}));
  }
  ok(cudaStreamSynchronize(stream_));
  ASSERT_EQ(peer_buffers->report().kind, PeerReport::none);
  ASSERT_FALSE(expected[0].bits() == expected[1].bits());

  const std::uint32_t start = ~std::uint32_t{0} - static_cast<std::uint32_t>(epochs / 2);
  ok(cudaMemcpy(view.epoch, &start, 4, cudaMemcpyHostToDevice));
  world_->gather("", "start of the soak");
  Graph graph(stream_, [&](Stream on) {
    for (int i = 0; i < kBatch; ++i) {
      const Step& step = steps[i % 2];
      const ExchangeParams e{view, step.merge(found[i % 2]), step.rows(), 1, Push::one_trip};
      if ((i / 2 + world_->rank()) % 2 == 0)
        apart(step, e);
      else
        backend_->attend(step.attend(), e, on);
    }
  });
  std::mt19937 random(fresh_seed());
  for (long done = 0; done < epochs; done += kBatch) {
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    for (const Step::Result& one : found)
      ok(cudaMemsetAsync(static_cast<std::byte*>(one.out.data()) + Step::kCanary, 0xA5,
                         one.out.bytes() - 2 * Step::kCanary, stream_));
    replay(graph);
    ASSERT_EQ(peer_buffers->report().kind, PeerReport::none) << "after " << done;
    for (int i = 0; i < 2; ++i)
      ASSERT_TRUE(found[i].bits() == expected[i].bits()) << "after " << done;
  }
}

TEST_F(PushTest, RanksThatMeanDifferentThingsAreReported) {
  const Case c{.kv_lens = {3000}};
  Step step = step_of(c, 1);
  auto peer_buffers = open(*world_, step.rows(), c.dim);
  ASSERT_TRUE(peer_buffers);
  const Step::Result result = step.result();
  const std::uint32_t shape = world_->rank() == 0 ? 7 : 8;
  ASSERT_TRUE(backend_->attend(
      step.attend(),
      ExchangeParams{peer_buffers->view(), step.merge(result), step.rows(), shape, Push::one_trip},
      Stream{stream_}));
  ok(cudaStreamSynchronize(stream_));
  EXPECT_EQ(peer_buffers->report().kind, PeerReport::differs);
  peer_buffers->abort();
}

/// Several planes of every block wait.
TEST_F(PushTest, ARankThatDoesNotComeEndsTheWait) {
  const auto world =
      from_mpi(MPI_COMM_WORLD, {.device = Device::cuda, .deadline = std::chrono::seconds(4)});
  world.make_current();
  const Case c = kSimulated ? Case{.q_lens = {8}, .kv_lens = {2000}, .heads = 16, .kv_heads = 2}
                            : Case{.q_lens = {8}, .kv_lens = {40000}, .heads = 64, .kv_heads = 8};
  Step step = step_of(c, 1);
  auto peer_buffers = open(world, step.rows(), c.dim);
  ASSERT_TRUE(peer_buffers);
  const Step::Result result = step.result();
  if (world.rank() != 1) {
    const auto begin = std::chrono::steady_clock::now();
    ASSERT_TRUE(backend_->attend(
        step.attend(),
        ExchangeParams{peer_buffers->view(), step.merge(result), step.rows(), 1, Push::one_trip},
        Stream{stream_}));
    ok(cudaStreamSynchronize(stream_));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
    EXPECT_EQ(peer_buffers->report().kind, PeerReport::timeout);
    EXPECT_EQ(peer_buffers->report().rank, 1u);
  }
  world_->gather("", "end of the wait");
  peer_buffers->abort();
}

/// Not a test of speed: a table for people. Steps of n keys of every sequence on each rank, beside
/// the step of one GPU with n keys: the time that the other ranks add.
TEST_F(PushTest, Times) {
  if (std::getenv("LONGSPAN_TIME") == nullptr) GTEST_SKIP() << "LONGSPAN_TIME is not set";
  struct Row {
    int tokens, heads;
    std::int32_t keys;
  };
  for (const Row& row :
       {Row{1, 32, 16384}, Row{1, 64, 16384}, Row{4, 64, 16384}, Row{16, 64, 4096}}) {
    const int ranks = world_->size();
    Case c{.q_lens = std::vector<std::int32_t>(row.tokens, 1),
           .kv_lens = std::vector<std::int32_t>(row.tokens, row.keys),
           .heads = row.heads,
           .kv_heads = 8};
    Step alone(c, 0, 1, 1);
    alone.take_scratch(*backend_);
    for (std::int32_t& n : c.kv_lens) n *= ranks;
    Step step = step_of(c, 1);
    auto peer_buffers = open(*world_, step.rows(), c.dim);
    ASSERT_TRUE(peer_buffers);
    const Step::Result result = step.result();
    const auto time = [&](const auto& work) { return time_of(work).median; };
    const double one =
        time([&](Stream on) { backend_->attend(alone.attend(), alone.merge(result), on); });
    const auto exchange = [&](Push push, bool overlap = true) {
      return ExchangeParams{
          peer_buffers->view(), step.merge(result), step.rows(), 1, push, 0, overlap};
    };
    const double separate = time([&](Stream) { apart(step, exchange(Push::automatic)); });
    bool pushed_so = true;
    const auto pushed = [&](bool overlap) {
      return time([&](Stream on) {
        pushed_so &= backend_->attend(step.attend(), exchange(Push::one_trip, overlap), on);
      });
    };
    const double over = pushed(true), after = pushed(false);
    EXPECT_TRUE(pushed_so);
    EXPECT_EQ(peer_buffers->report().kind, PeerReport::none);
    if (world_->rank() != 0) continue;
    std::printf("# %2d x %2d, %d ranks with %d keys of each sequence: one GPU %.2f us; added: ",
                row.tokens, row.heads, ranks, row.keys, one);
    std::printf(
        "kernels of their own %.2f (%s), pushed from the epilogue %.2f, that when all of "
        "the attention has ended %.2f\n",
        separate - one, name(kernels::cuda::choose_push(step.rows(), c.dim, ranks)), over - one,
        after - one);
  }
}

}  // namespace
}  // namespace longspan::tests
