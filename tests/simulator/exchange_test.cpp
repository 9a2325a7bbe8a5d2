// The exchange between ranks that are all in one process: each has a GPU, a window and a stream of
// its own, and one schedule decides about all of them, so that words come late and out of order, a
// rank is slow, does not come, gives up or means something else, and a seed says all of it. The
// bits are those of merging all states on one GPU.
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
#include "kernels/cuda/exchange.hpp"
#include "kernels/simulated/machine.hpp"
#include "tests/fresh_seed.hpp"

namespace longspan::testing {
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

std::vector<std::byte> random_states(const Problem& p, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::byte> memory(p.slot_bytes() * static_cast<std::size_t>(p.ranks));
  const StateSlots slots{memory.data(), p.rows, p.dim, p.ranks};
  for (int r = 0; r < p.ranks; ++r)
    for (std::int64_t row = 0; row < p.rows; ++row) {
      const bool empty = random() % 8 == 0;
      slots.stats(r)[row] = {5 * normal(random), empty ? 0.0f : 1 + std::abs(normal(random))};
      for (int d = 0; d < p.dim; ++d)
        slots.o(r, row)[d] = empty ? std::numeric_limits<float>::quiet_NaN() : normal(random);
    }
  return memory;
}

/// Ranks, their windows and their results.
class Ranks {
 public:
  explicit Ranks(const Problem& p, std::uint64_t deadline_ns = 60'000'000'000) : p_(p) {
    const auto bytes = kernels::cuda::window_bytes(p.rows, p.dim, p.ranks);
    for (int r = 0; r < p.ranks; ++r) {
      EXPECT_EQ(cudaSetDevice(r), cudaSuccess) << "LONGSPAN_SIMULATED_GPUS says how many there are";
      windows_.push_back(std::make_unique<Memory<std::byte>>(bytes, 0));
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
    const auto states = random_states(p_, seed);
    const std::size_t slot = p_.slot_bytes();
    for (int r = 0; r < p_.ranks; ++r) {
      const auto at = static_cast<std::size_t>(r) * slot;
      own_[static_cast<std::size_t>(r)]->write(states.data() + at, at, slot);
    }
    Memory<std::byte> whole(states.size()), out(p_.out_bytes());
    Memory<float> lse(static_cast<std::size_t>(p_.rows));
    whole.write(states.data(), 0, states.size());
    kernels::cuda_backend()->merge(merge_of(whole.get(), out.get(), lse.get()), Stream{});
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    expected_out_ = out.read(), expected_lse_ = lse.read();
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
    m.lse = lse;
    m.lse_row_stride = p_.heads;
    m.lse_head_stride = 1;
    return m;
  }
  ExchangeParams params(int rank, std::uint64_t deadline_ns) const {
    const auto at = static_cast<std::size_t>(rank);
    ExchangeParams e;
    e.peers.rank = rank;
    e.peers.ranks = p_.ranks;
    for (std::size_t r = 0; r < windows_.size(); ++r) e.peers.window[r] = windows_[r]->get();
    e.peers.bytes = kernels::cuda::window_bytes(p_.rows, p_.dim, p_.ranks);
    e.peers.epoch = epochs_[at]->get();
    e.peers.abort = &words_[at]->abort;
    e.peers.report = &words_[at]->report;
    e.peers.deadline_ns = deadline_ns;
    e.merge = merge_of(own_[at]->get(), out_[at]->get(), lse_[at]->get());
    e.capacity = p_.rows;
    e.hash = 1;
    e.push = p_.push;
    e.blocks = p_.blocks;
    e.overlap = p_.overlap;
    return e;
  }

  Problem p_;
  std::vector<std::unique_ptr<Memory<std::byte>>> windows_, own_, out_;
  std::vector<std::unique_ptr<Memory<std::uint32_t>>> epochs_;
  std::vector<std::unique_ptr<Memory<float>>> lse_;
  std::vector<Words*> words_;
  std::vector<cudaStream_t> streams_;
  std::vector<ExchangeParams> params_;
  std::vector<std::byte> expected_out_;
  std::vector<float> expected_lse_;
};

/// The windows of all ranks are known only when all are made: the first ranks' params get them.
void link(Ranks& ranks, int count) {
  for (int r = 0; r < count; ++r)
    for (int p = 0; p < count; ++p) ranks[r].peers.window[p] = ranks[count - 1].peers.window[p];
}

class Exchange : public ::testing::TestWithParam<Problem> {};

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
};
std::string name_of(const ::testing::TestParamInfo<Problem>& tested) {
  const Problem& p = tested.param;
  return "ranks" + std::to_string(p.ranks) + "_rows" + std::to_string(p.rows) + "_dim" +
         std::to_string(p.dim) + (p.push == Push::two_trips ? "_two_trips" : "_one_trip");
}
INSTANTIATE_TEST_SUITE_P(All, Exchange, ::testing::ValuesIn(kProblems), name_of);

}  // namespace
}  // namespace longspan::testing
