// The exchange between ranks that are all in one process: each has its own GPU, window and stream.
// One schedule decides about all of them. So words come late and out of order, a rank is slow, does
// not come, gives up or has other arguments, all by a seed. The bits are those of merging all
// states on one GPU.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/backend.hpp"
#include "kernels/cuda/dispatch/attend.hpp"
#include "kernels/cuda/exchange/exchange.hpp"
#include "kernels/simulated/machine.hpp"
#include "tests/gpu/gpu_judge.hpp"

namespace longspan::tests {
namespace {

using kernels::ExchangeParams;
using kernels::MergeParams;
using kernels::Push;
using kernels::StateSlots;

/// Memory of a GPU, with nothing in it.
template <class T>
class Memory {
 public:
  explicit Memory(std::size_t count, int fill = 0xff) : count_(count) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, count * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemset(memory, fill, count * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    data_.reset(static_cast<T*>(memory));
  }
  T* get() const { return data_.get(); }
  std::vector<T> read() const {
    std::vector<T> all(count_);
    EXPECT_EQ(cudaMemcpy(all.data(), get(), count_ * sizeof(T), cudaMemcpyDefault), cudaSuccess);
    return all;
  }
  void write(const T* from, std::size_t at, std::size_t count) {
    EXPECT_EQ(cudaMemcpy(get() + at, from, count * sizeof(T), cudaMemcpyDefault), cudaSuccess);
  }

 private:
  struct Free {
    void operator()(T* memory) const { cudaFree(memory); }
  };
  std::size_t count_;
  std::unique_ptr<T, Free> data_;
};

struct Problem {
  int ranks = 2;
  std::int64_t rows = 5;
  int heads = 1, dim = 16;
  DType dtype = DType::fp32;
  Push push = Push::one_trip;
  int blocks = 0;
  bool overlap = true;

  std::size_t slot_bytes() const { return static_cast<std::size_t>(StateSlots::bytes(rows, dim)); }
  std::size_t out_bytes() const { return static_cast<std::size_t>(rows * dim) * size_of(dtype); }
};

std::vector<std::byte> random_states(const Problem& p, int count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::byte> memory(p.slot_bytes() * static_cast<std::size_t>(count));
  const StateSlots slots{memory.data(), p.rows, p.dim, count};
  for (int r = 0; r < count; ++r)
    for (std::int64_t row = 0; row < p.rows; ++row) {
      const bool empty = random() % 8 == 0;
      slots.stats(r)[row] = {5 * normal(random), empty ? 0.0f : 1 + std::abs(normal(random))};
      for (int d = 0; d < p.dim; ++d)
        slots.o(r, row)[d] = empty ? std::numeric_limits<float>::quiet_NaN() : normal(random);
    }
  return memory;
}

/// Ranks, their peer buffers and their results.
class Ranks {
 public:
  explicit Ranks(const Problem& p, std::uint64_t deadline_ns = 60'000'000'000) : p_(p) {
    const auto bytes = kernels::cuda::peer_buffer_bytes(p.rows, p.dim, p.ranks);
    for (int r = 0; r < p.ranks; ++r) {
      EXPECT_EQ(cudaSetDevice(r), cudaSuccess) << "LONGSPAN_SIMULATED_GPUS says how many there are";
      peer_buffers_.push_back(std::make_unique<Memory<std::byte>>(bytes, 0));
      epochs_.push_back(std::make_unique<Memory<std::uint32_t>>(2, 0));
      own_.push_back(
          std::make_unique<Memory<std::byte>>(p.slot_bytes() * static_cast<std::size_t>(p.ranks)));
      out_.push_back(std::make_unique<Memory<std::byte>>(p.out_bytes()));
      lse_.push_back(std::make_unique<Memory<float>>(static_cast<std::size_t>(p.rows)));
      Words* words = nullptr;
      EXPECT_EQ(cudaHostAlloc(reinterpret_cast<void**>(&words), sizeof(Words), 0), cudaSuccess);
      *words = {};
      words_.push_back(words);
      cudaStream_t stream = nullptr;
      EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
      streams_.push_back(stream);
      params_.push_back(params(r, deadline_ns));
    }
  }
  ~Ranks() {
    cudaSetDevice(0);
    for (Words* words : words_) cudaFreeHost(words);
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  }

  ExchangeParams& operator[](int rank) { return params_[static_cast<std::size_t>(rank)]; }
  void give_up(int rank) { words_[static_cast<std::size_t>(rank)]->abort = 1; }
  PeerReport report(int rank) const {
    return PeerReport::of(words_[static_cast<std::size_t>(rank)]->report);
  }
  void begin_at(std::uint32_t epoch) {
    for (const auto& each : epochs_) each->write(&epoch, 0, 1);
  }

  /// New states, and their merge on one GPU.
  void fill(unsigned seed) {
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    const auto states = random_states(p_, p_.ranks, seed);
    const std::size_t slot = p_.slot_bytes();
    for (int r = 0; r < p_.ranks; ++r) {
      const auto at = static_cast<std::size_t>(r) * slot;
      own_[static_cast<std::size_t>(r)]->write(states.data() + at, at, slot);
    }
    Memory<std::byte> whole(states.size());
    whole.write(states.data(), 0, states.size());
    expect_merged(whole.get());
  }
  /// The results must be those of merging all these states on one GPU.
  void expect_merged(std::byte* states) {
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    Memory<std::byte> out(p_.out_bytes());
    Memory<float> lse(static_cast<std::size_t>(p_.rows));
    kernels::cuda_backend()->merge(merge_of(states, out.get(), lse.get()), Stream{});
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    expect(out.read(), lse.read());
  }
  void expect(std::vector<std::byte> out, std::vector<float> lse) {
    expected_out_ = std::move(out), expected_lse_ = std::move(lse);
  }
  cudaStream_t stream(int rank) const { return streams_[static_cast<std::size_t>(rank)]; }
  /// Queues work that erases the rank's results.
  void forget(int rank) {
    EXPECT_EQ(cudaSetDevice(rank), cudaSuccess);
    const auto at = static_cast<std::size_t>(rank);
    const auto ranks = static_cast<std::size_t>(p_.ranks), rows = static_cast<std::size_t>(p_.rows);
    const auto fill = [&](void* memory, std::size_t bytes) {
      EXPECT_EQ(cudaMemsetAsync(memory, 0xff, bytes, streams_[at]), cudaSuccess);
    };
    fill(own_[at]->get(), p_.slot_bytes() * ranks);
    fill(out_[at]->get(), p_.out_bytes());
    fill(lse_[at]->get(), rows * sizeof(float));
  }
  void queue(int rank) {
    EXPECT_EQ(cudaSetDevice(rank), cudaSuccess);
    kernels::cuda::exchange((*this)[rank], streams_[static_cast<std::size_t>(rank)]);
  }
  void finish(int rank) {
    EXPECT_EQ(cudaStreamSynchronize(streams_[static_cast<std::size_t>(rank)]), cudaSuccess);
  }
  void expect_results() {
    for (int r = 0; r < p_.ranks; ++r) {
      SCOPED_TRACE("rank " + std::to_string(r));
      const auto at = static_cast<std::size_t>(r);
      EXPECT_EQ(static_cast<int>(report(r).kind), PeerReport::none) << "of rank " << report(r).rank;
      EXPECT_TRUE(out_[at]->read() == expected_out_);
      const auto bits = [](const std::vector<float>& lse) {
        std::vector<std::uint32_t> words(lse.size());
        std::memcpy(words.data(), lse.data(), lse.size() * 4);
        return words;
      };
      EXPECT_EQ(bits(lse_[at]->read()), bits(expected_lse_));
    }
  }

 private:
  struct Words {
    std::uint64_t report;
    std::uint32_t abort;
  };

  MergeParams merge_of(std::byte* states, std::byte* out, float* lse) const {
    MergeParams m;
    m.states = {states, p_.rows, p_.dim, p_.ranks};
    m.heads = p_.heads;
    m.tokens = p_.rows / p_.heads;
    m.dtype = p_.dtype;
    m.out = {out, std::int64_t{p_.heads} * p_.dim, p_.dim};
    m.lse = {lse, p_.heads, 1};
    return m;
  }
  ExchangeParams params(int rank, std::uint64_t deadline_ns) const {
    const auto at = static_cast<std::size_t>(rank);
    ExchangeParams e;
    e.peers.rank = rank;
    e.peers.ranks = p_.ranks;
    for (std::size_t r = 0; r < peer_buffers_.size(); ++r)
      e.peers.peer_buffer[r] = peer_buffers_[r]->get();
    e.peers.bytes = kernels::cuda::peer_buffer_bytes(p_.rows, p_.dim, p_.ranks);
    e.peers.epoch = epochs_[at]->get();
    e.peers.abort = &words_[at]->abort;
    e.peers.report = &words_[at]->report;
    e.peers.deadline_ns = deadline_ns;
    e.merge = merge_of(own_[at]->get(), out_[at]->get(), lse_[at]->get());
    e.capacity = p_.rows;
    e.hash = 0x1234'5678'9abc'def1;  // each half of a header has a meaning
    e.push = p_.push;
    e.blocks = p_.blocks;
    e.overlap = p_.overlap;
    return e;
  }

  Problem p_;
  std::vector<std::unique_ptr<Memory<std::byte>>> peer_buffers_, own_, out_;
  std::vector<std::unique_ptr<Memory<std::uint32_t>>> epochs_;
  std::vector<std::unique_ptr<Memory<float>>> lse_;
  std::vector<Words*> words_;
  std::vector<cudaStream_t> streams_;
  std::vector<ExchangeParams> params_;
  std::vector<std::byte> expected_out_;
  std::vector<float> expected_lse_;
};

/// The peer buffers of all ranks are known only after all are made: then the first ranks' params
/// get them.
void link(Ranks& ranks, int count) {
  for (int r = 0; r < count; ++r)
    for (int p = 0; p < count; ++p)
      ranks[r].peers.peer_buffer[p] = ranks[count - 1].peers.peer_buffer[p];
}

class Exchange : public ::testing::TestWithParam<Problem> {};

/// The exchange may get a place on the GPU while the kernel before it still writes the states.
struct Attended {
  const char* name;
  test::Case c;
  bool pushed = false;  // the exchange itself folds the splits
};
void PrintTo(const Attended& attended, std::ostream* out) { *out << attended.name; }
class ExchangeOfAttention : public ::testing::TestWithParam<Attended> {};

TEST_P(ExchangeOfAttention, BitsOfOneGpu) {
  test::Case c = GetParam().c;
  c.seed = fresh_seed();
  const test::Data data(c);
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  test::GpuRun run(c, data);
  const test::Result result = run.run();
  test::expect_exact(c, data, result);

  const Problem p{.ranks = c.ranks,
                  .rows = c.tokens() * c.heads,
                  .heads = c.heads,
                  .dim = c.dim,
                  .dtype = c.dtype};
  Ranks ranks(p);
  link(ranks, c.ranks);
  ranks.expect(result.out, result.lse);
  const auto backend = kernels::cuda_backend();
  std::vector<std::unique_ptr<Memory<std::byte>>> scratches;
  for (int r = 0; r < c.ranks; ++r) {
    EXPECT_EQ(cudaSetDevice(r), cudaSuccess);
    scratches.push_back(std::make_unique<Memory<std::byte>>(run.params(r).scratch_bytes));
  }
  for (int turn = 0; turn < 2; ++turn) {
    for (int r = 0; r < c.ranks; ++r) {
      ranks.forget(r);
      kernels::AttendParams attend = run.params(r);
      attend.state = ranks[r].merge.states;
      attend.scratch = scratches[static_cast<std::size_t>(r)]->get();
      EXPECT_EQ(cudaMemsetAsync(attend.scratch, 0xff, attend.scratch_bytes, ranks.stream(r)),
                cudaSuccess);
      if (GetParam().pushed) {
        EXPECT_TRUE(backend->attend(attend, ranks[r], {ranks.stream(r)}));
      } else {
        backend->attend(attend, {ranks.stream(r)});
        ranks.queue(r);
      }
    }
    for (int r = 0; r < c.ranks; ++r) ranks.finish(r);
    ranks.expect_results();
    if (HasFailure()) return;
  }
}

const Attended kAttended[] = {
    {"folded", {.heads = 4, .kv_heads = 1, .q_lens = {2}, .kv_lens = {1500}, .ranks = 2}},
    {"pushed", {.heads = 4, .kv_heads = 1, .q_lens = {2}, .kv_lens = {1500}, .ranks = 2}, true},
    {"pushed_by_three",
     {.heads = 6, .kv_heads = 1, .q_lens = {3}, .kv_lens = {1200}, .ranks = 3},
     true},
};
std::string name_of_attended(const ::testing::TestParamInfo<Attended>& tested) {
  return tested.param.name;
}
INSTANTIATE_TEST_SUITE_P(All, ExchangeOfAttention, ::testing::ValuesIn(kAttended),
                         name_of_attended);

/// The exchange that first folds splits, more than a small problem has: planes of threads fold them
/// together, and a block takes rows several times. The kernel before it writes the last split, and
/// lets the exchange get a place meanwhile.
struct Split {
  Problem problem;
  int splits = 16;
};
class ExchangeOfSplits : public ::testing::TestWithParam<Split> {};

/// States of `count` splits in separate memory.
struct Parts {
  Memory<std::byte> memory;
  kernels::cuda::WorkPlan plan;

  Parts(const Problem& p, int count) : memory(p.slot_bytes() * static_cast<std::size_t>(count)) {
    plan.lengths = kernels::cuda::Lengths::only_short;
    plan.splits = count;
    plan.parts = {memory.get(), p.rows, p.dim, count};
  }
};

TEST_P(ExchangeOfSplits, BitsOfOneGpu) {
  const auto& [p, splits] = GetParam();
  const unsigned seed = fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Ranks ranks(p);
  link(ranks, p.ranks);
  const auto count = static_cast<std::size_t>(p.ranks);
  Memory<std::byte> whole(p.slot_bytes() * count);
  std::vector<std::unique_ptr<Parts>> parts, halves;  // of each rank's states, and of a last split
  for (int r = 0; r < p.ranks; ++r) {
    EXPECT_EQ(cudaSetDevice(r), cudaSuccess);
    parts.push_back(std::make_unique<Parts>(p, splits));
    halves.push_back(std::make_unique<Parts>(p, 2));
  }
  kernels::AttendParams attend;
  attend.tokens = p.rows / p.heads;
  attend.heads = p.heads;
  attend.head_dim = attend.value_dim = p.dim;
  attend.batch.size = 1;
  const auto fold = [&](const Parts& from, const StateSlots& to, int slot, cudaStream_t stream) {
    attend.state = to;
    attend.slot = slot;
    kernels::cuda::fold_parts(attend, from.plan, stream);
  };
  for (unsigned turn = 0; turn < 2; ++turn) {
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    for (std::size_t r = 0; r < count; ++r) {
      const auto states = random_states(p, splits + 1, seed + turn * 16 + static_cast<unsigned>(r));
      const std::size_t first = static_cast<std::size_t>(splits - 1) * p.slot_bytes();
      parts[r]->memory.write(states.data(), 0, first);
      halves[r]->memory.write(states.data() + first, 0, 2 * p.slot_bytes());
      fold(*halves[r], parts[r]->plan.parts, splits - 1, nullptr);
      fold(*parts[r], {whole.get(), p.rows, p.dim, p.ranks}, static_cast<int>(r), nullptr);
    }
    ranks.expect_merged(whole.get());
    for (int r = 0; r < p.ranks; ++r) {
      const Parts& own = *parts[static_cast<std::size_t>(r)];
      ranks.forget(r);
      std::byte* last = own.memory.get() + static_cast<std::size_t>(splits - 1) * p.slot_bytes();
      EXPECT_EQ(cudaMemsetAsync(last, 0xff, p.slot_bytes(), ranks.stream(r)), cudaSuccess);
      fold(*halves[static_cast<std::size_t>(r)], own.plan.parts, splits - 1, ranks.stream(r));
      kernels::cuda::exchange_parts(own.plan, ranks[r], 3, ranks.stream(r));
    }
    for (int r = 0; r < p.ranks; ++r) ranks.finish(r);
    ranks.expect_results();
    if (HasFailure()) return;
  }
}

constexpr Split kSplits[] = {
    {{.ranks = 2, .rows = 20, .heads = 2, .dim = 64}, 4},
    {{.ranks = 2, .rows = 20, .heads = 4, .dim = 64, .dtype = DType::bf16, .blocks = 1}, 16},
    {{.ranks = 3, .rows = 6, .heads = 2, .dim = 256}, 32},
    {{.ranks = 2, .rows = 2, .heads = 2, .dim = 128, .dtype = DType::fp16}, 256},
    {{.ranks = 2, .rows = 4, .heads = 2, .dim = 512}, 64},
    {{.ranks = 2, .rows = 6, .heads = 2, .dim = 21, .dtype = DType::bf16}, 8},
};
std::string name_of_split(const ::testing::TestParamInfo<Split>& tested) {
  return "splits" + std::to_string(tested.param.splits);
}
INSTANTIATE_TEST_SUITE_P(All, ExchangeOfSplits, ::testing::ValuesIn(kSplits), name_of_split);

TEST_P(Exchange, BitsOfTheMergeOverManyEpochs) {
  const Problem p = GetParam();
  const unsigned seed = fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Ranks ranks(p);
  link(ranks, p.ranks);
  ranks.begin_at(~std::uint32_t{0} - 3);  // the count of epochs wraps on the way
  std::mt19937 random(seed);
  for (unsigned turn = 0; turn < 6; ++turn) {
    ranks.fill(seed + turn);
    // Ranks queue one, two or three exchanges of the same states, some of them late.
    const int repeats = 1 + static_cast<int>(random() % 3);
    for (int r = 0; r < p.ranks; ++r) {
      for (int i = 0; i < repeats; ++i) ranks.queue(r);
      for (unsigned slices = random() % 400; slices > 0; --slices) cudaStreamQuery(nullptr);
    }
    for (int r = 0; r < p.ranks; ++r) ranks.finish(r);
    ranks.expect_results();
    if (HasFailure()) return;
  }
}

TEST_P(Exchange, WhoDoesNotComeIsNamedByAll) {
  const Problem p = GetParam();
  Ranks ranks(p, 300'000'000);
  link(ranks, p.ranks);
  ranks.fill(1);
  const int absent = p.ranks - 1;
  for (int r = 0; r < p.ranks; ++r)
    if (r != absent) ranks.queue(r);
  for (int r = 0; r < p.ranks; ++r) {
    if (r == absent) continue;
    ranks.finish(r);
    EXPECT_EQ(static_cast<int>(ranks.report(r).kind), PeerReport::timeout);
    EXPECT_EQ(static_cast<int>(ranks.report(r).rank), absent);
  }
}

TEST_P(Exchange, WhoGivesUpWaitsNoLonger) {
  const Problem p = GetParam();
  Ranks ranks(p);
  link(ranks, p.ranks);
  ranks.fill(1);
  ranks.queue(0);
  for (int slices = 0; slices < 50; ++slices) cudaStreamQuery(nullptr);
  ranks.give_up(0);
  ranks.finish(0);
  EXPECT_EQ(static_cast<int>(ranks.report(0).kind), PeerReport::aborted);
}

TEST_P(Exchange, WhoMeansSomethingElseIsNamed) {
  const Problem p = GetParam();
  Ranks ranks(p, 300'000'000);
  link(ranks, p.ranks);
  ranks.fill(1);
  ranks[p.ranks - 1].hash = 2;
  for (int r = 0; r < p.ranks; ++r) ranks.queue(r);
  for (int r = 0; r < p.ranks; ++r) ranks.finish(r);
  for (int r = 0; r < p.ranks; ++r) {
    EXPECT_EQ(static_cast<int>(ranks.report(r).kind), PeerReport::differs) << "rank " << r;
    if (r < p.ranks - 1) {
      EXPECT_EQ(static_cast<int>(ranks.report(r).rank), p.ranks - 1);
    }
  }
}

constexpr Problem kProblems[] = {
    {.ranks = 2},
    {.ranks = 2, .push = Push::two_trips},
    {.ranks = 3, .rows = 12, .heads = 2, .dim = 64, .dtype = DType::bf16},
    {.ranks = 3, .rows = 12, .heads = 2, .dim = 64, .dtype = DType::bf16, .push = Push::two_trips},
    {.ranks = 4, .rows = 40, .dim = 32, .dtype = DType::e4m3, .push = Push::two_trips},
    {.ranks = 4, .rows = 24, .dim = 64, .dtype = DType::fp16, .blocks = 3, .overlap = false},
    {.ranks = 8, .rows = 9, .dim = 16, .push = Push::two_trips},
    {.ranks = 2, .rows = 7, .dim = 512, .dtype = DType::bf16},
    {.ranks = 3, .rows = 5, .dim = 512, .push = Push::two_trips},
    {.ranks = 2, .rows = 40, .dim = 8},
    {.ranks = 2, .rows = 6, .heads = 2, .dim = 21, .dtype = DType::bf16},
    {.ranks = 3, .rows = 12, .heads = 2, .dim = 59, .dtype = DType::fp16, .push = Push::two_trips},
    {.ranks = 2, .rows = 6, .heads = 2, .dim = 12, .push = Push::two_trips},
    {.ranks = 2, .rows = 4, .dim = 1, .dtype = DType::e4m3, .push = Push::two_trips},
};
std::string name_of(const ::testing::TestParamInfo<Problem>& tested) {
  const Problem& p = tested.param;
  return "ranks" + std::to_string(p.ranks) + "_rows" + std::to_string(p.rows) + "_dim" +
         std::to_string(p.dim) + (p.push == Push::two_trips ? "_two_trips" : "_one_trip");
}
INSTANTIATE_TEST_SUITE_P(All, Exchange, ::testing::ValuesIn(kProblems), name_of);

}  // namespace
}  // namespace longspan::tests
