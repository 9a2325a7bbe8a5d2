// Attention that begins before the keys of other ranks have come (KeyArrivals): against float64 and
// the bits of a call that has all keys. What comes late is NaN until then, and so is all that the
// call must not read.
#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "comm/cuda/stream_flags.hpp"
#include "longspan/error.hpp"
#include "src/strategy/shared/stretches.hpp"
#include "tests/gpu/sm90_run.hpp"
#include "tests/support/simulated.hpp"

namespace longspan::test {
namespace {

using kernels::KeyArrivals;

/// A stream that waits for no other.
class OwnStream {
 public:
  OwnStream() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  ~OwnStream() { EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void wait() const { EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// One rank's call, and the others, which send it their keys in some pieces each.
class LateKeys {
 public:
  LateKeys(const Case& c, const Data& data, const Shard& shard, int pieces)
      : c_(c),
        shard_(shard),
        length_(c.kv_lens[0]),
        whole_(c, data),
        k_(data.k[0].size()),
        v_(data.v[0].size()),
        all_k_(data.k[0]),
        all_v_(data.v[0]) {
    arrivals_.rank = shard.rank;
    arrivals_.ranks = shard.ranks;
    for (int rank = 0; rank < shard.ranks; ++rank) {
      const auto stretches = stretches_of(shard.with_rank(rank), length_);
      EXPECT_TRUE(stretches);
      portions_.push_back(in_portions(*stretches, pieces));
      pieces_ = std::max(pieces_, portions_.back().size());
      if (rank == shard.rank) own_ = *stretches;
    }
    for (int rank = 0; rank < shard.ranks; ++rank) add_portions(rank);
    std::sort(arrivals_.portion, arrivals_.portion + arrivals_.portions,
              [](const auto& a, const auto& b) { return a.begin > b.begin; });
    signals_ = OnGpu<std::uint64_t>(
        std::vector<std::uint64_t>((1 + pieces_) * static_cast<std::size_t>(shard.ranks), 0));
    arrivals_.signals = signals_.data();
    words_ = OnGpu<std::uint64_t>(static_cast<std::size_t>(shard.ranks));
    report_ = OnGpu<std::uint64_t>(std::vector<std::uint64_t>{0});
    std::vector<std::byte> k, v;
    for (std::int64_t i = 0; i < shard.local_len(length_); ++i) {
      const std::int64_t position = shard.position(i, length_);
      for (auto [to, from] : {std::pair{&k, &data.k[0]}, std::pair{&v, &data.v[0]}})
        to->insert(to->end(), from->begin() + position * row(),
                   from->begin() + (position + 1) * row());
    }
    own_k_ = OnGpu<std::byte>(k);
    own_v_ = OnGpu<std::byte>(v);
    arrivals_.k = rows_of(own_k_);
    arrivals_.v = rows_of(own_v_);
  }

  const KeyArrivals& arrivals() const { return arrivals_; }

  kernels::AttendParams params() const {
    kernels::AttendParams p = whole_.params();
    p.k = rows_of(k_);
    p.v = rows_of(v_);
    p.batch = {};
    p.shard = {.length = length_};
    p.arrivals = &arrivals_;
    return p;
  }

  /// Queues the call first, and then what it waits for. The ranks say `words` of the run.
  Result run(const std::vector<std::uint64_t>& words) {
    OwnStream computes, sends;
    const OnGpu<std::uint64_t> said(words);
    kernels::sm90::Finished finished = whole_.poisoned();
    finished.headers = {words_.data(), shard_.rank, shard_.ranks, kRun, report_.data()};
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // as these streams wait for no other
    copy_margins(computes);
    send_word(said, shard_.rank, computes);
    kernels::sm90::attend(params(), finished, 0, computes);
    if (!tests::kSimulated && shard_.local_len(length_) < length_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_EQ(cudaStreamQuery(computes), cudaErrorNotReady) << "it did not wait";
    }
    for (std::size_t piece = 0; piece <= pieces_; ++piece)
      for (int rank = 0; rank < shard_.ranks; ++rank)
        if (rank != shard_.rank) {
          if (piece == 0) send_word(said, rank, sends);
          send(piece, rank, sends);
        }
    sends.wait();
    computes.wait();
    return whole_.result();
  }
  Result run() {
    return run(std::vector<std::uint64_t>(static_cast<std::size_t>(shard_.ranks), 11));
  }

  /// What the call said of the words.
  std::uint64_t report() const { return report_.values(1)[0]; }
  static constexpr std::uint32_t kRun = 5;

 private:
  std::int64_t row() const {
    return std::int64_t{c_.kv_heads} * c_.dim * static_cast<std::int64_t>(size_of(c_.dtype));
  }
  kernels::KvRows rows_of(const OnGpu<std::byte>& memory) const {
    return {memory.data(), std::int64_t{c_.kv_heads} * c_.dim, c_.dim};
  }

  /// A rank's portions among those of all, with the signals of their pieces.
  void add_portions(int rank) {
    const auto add = [&](const Stretch& one, std::int64_t place) {
      arrivals_.portion[arrivals_.portions++] = {static_cast<int>(one.position),
                                                 static_cast<int>(place)};
    };
    if (rank == shard_.rank) {
      for (const Stretch& one : own_) add(one, one.first);
      return;
    }
    int signal = rank;
    for (const Stretch& one : portions_[static_cast<std::size_t>(rank)])
      add(one, ~(signal += shard_.ranks));
  }

  void copy_margins(cudaStream_t stream) {
    for (const Stretch& own : own_) {
      const std::int64_t count = std::min<std::int64_t>(own.count, KeyArrivals::kMargin);
      for (const std::int64_t from : {std::int64_t{0}, own.count - count})
        for (const auto& [to, keys] : {std::pair{&k_, &own_k_}, std::pair{&v_, &own_v_}})
          EXPECT_EQ(cudaMemcpyAsync(to->data() + (own.position + from) * row(),
                                    keys->data() + (own.first + from) * row(),
                                    static_cast<std::size_t>(count * row()),
                                    cudaMemcpyDeviceToDevice, stream),
                    cudaSuccess);
    }
  }

  void send_word(const OnGpu<std::uint64_t>& said, int rank, cudaStream_t stream) {
    EXPECT_EQ(cudaMemcpyAsync(words_.data() + rank, said.data() + rank, sizeof(std::uint64_t),
                              cudaMemcpyDeviceToDevice, stream),
              cudaSuccess);
  }

  void send(std::size_t piece, int rank, cudaStream_t stream) {
    const auto& portions = portions_[static_cast<std::size_t>(rank)];
    if (piece > 0 && piece <= portions.size()) {
      const Stretch& one = portions[piece - 1];
      for (const auto& [to, from] : {std::pair{&k_, &all_k_}, std::pair{&v_, &all_v_}})
        EXPECT_EQ(
            cudaMemcpyAsync(to->data() + one.position * row(), from->data() + one.position * row(),
                            static_cast<std::size_t>(one.count * row()), cudaMemcpyDeviceToDevice,
                            stream),
            cudaSuccess);
    }
    const auto index = static_cast<std::int64_t>(piece) * shard_.ranks + rank;
    comm::queue_flags(stream, {{comm::FlagOperation::raise,
                                reinterpret_cast<std::byte*>(signals_.data() + index)}});
  }

  Case c_;
  Shard shard_;
  std::int64_t length_;
  Sm90Run whole_;           // has queries and results
  OnGpu<std::byte> k_, v_;  // as the call sees them
  OnGpu<std::byte> all_k_, all_v_, own_k_, own_v_;
  OnGpu<std::uint64_t> signals_, words_, report_;
  std::vector<Stretch> own_;
  std::vector<std::vector<Stretch>> portions_;  // of each rank
  std::size_t pieces_ = 0;                      // the most of them
  KeyArrivals arrivals_;
};

void expect_as_if_all_were_there(const Case& c, const Shard& shard, int pieces, int stride = 3) {
  if (is_left_out(2 * kOnHopper * work_of(c))) return;
  SCOPED_TRACE(::testing::Message() << c << " rank " << shard.rank << " of " << shard.ranks << " "
                                    << name(shard.layout) << ", pieces " << pieces);
  const Data data(c);
  LateKeys late(c, data, shard, pieces);
  ASSERT_TRUE(kernels::sm90::takes_arrivals(late.params()));
  const Result found = late.run();
  expect_within_rounding(c, data, found, stride);
  const Result whole = Sm90Run(c, data).finish();
  EXPECT_EQ(found.out, whole.out);
  EXPECT_EQ(found.lse, whole.lse);
  EXPECT_EQ(late.report(), 0u);
}

TEST(KeyArrivals, EveryRankOfEveryLayoutInOneAndSeveralPieces) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int ranks : {2, 3})
    for (int rank = 0; rank < ranks; ++rank)
      for (const Layout layout : {Layout::zigzag, Layout::contiguous})
        for (const int pieces : {1, 3, KeyArrivals::kMostPieces}) {
          const Case c{.heads = 8,
                       .kv_heads = 4,
                       .dim = rank == 0 ? 128 : 64,
                       .q_lens = {140},
                       .kv_lens = {reduced(2300, 1100)},
                       .mask = {.causal = rank != 1},
                       .seed = fresh_seed()};
          expect_as_if_all_were_there(c, {layout, rank, ranks, c.kv_lens[0]}, pieces);
        }
}

// Stretches shorter than a tile of keys, than two margins, of one key, and none at all.
TEST(KeyArrivals, StretchesOfAnyLength) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int kv_len : {17, 40, 159, 161, 385, 700})
    for (const int ranks : {2, 8})
      for (const int rank : {0, ranks - 1}) {
        const Case c{.heads = 2,
                     .kv_heads = 2,
                     .dim = 128,
                     .q_lens = {17},
                     .kv_lens = {kv_len},
                     .mask = {.causal = true},
                     .sinks = true,
                     .seed = fresh_seed()};
        expect_as_if_all_were_there(c, {Layout::zigzag, rank, ranks, kv_len}, 1);
        expect_as_if_all_were_there(c, {Layout::contiguous, rank, ranks, kv_len}, 2);
      }
}

TEST(KeyArrivals, EveryMaskTileAndWayToScore) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const int dim : {64, 80, 96, 128, 192, 256})
      for (const Mask& mask : kMasks)
        for (const float softcap : {0.0f, 20.0f}) {
          Case c{.dtype = dtype,
                 .heads = 3,
                 .kv_heads = 3,
                 .dim = dim,
                 .q_lens = {250},
                 .kv_lens = {900},
                 .mask = mask,
                 .softcap = softcap,
                 .seed = fresh_seed()};
          if (softcap == 0.0f && mask.window == 0) c.alibi = Alibi::query;
          expect_as_if_all_were_there(c, {Layout::zigzag, dim % 3 == 0 ? 0 : 1, 2, 900}, 2, 7);
        }
}

/// What ranks say of the run comes late too, and is compared before anything is written.
TEST(KeyArrivals, CompareWhatRanksSay) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int other : {0, 2}) {
    const Case c{.q_lens = {140}, .kv_lens = {1000}, .seed = fresh_seed()};
    const Data data(c);
    LateKeys late(c, data, {Layout::zigzag, 1, 3, 1000}, 1);
    std::vector<std::uint64_t> words(3, 11);
    words[static_cast<std::size_t>(other)] = 12;
    const Result found = late.run(words);
    EXPECT_EQ(late.report(), kernels::RunHeaders::reported(LateKeys::kRun, other));
    EXPECT_THAT(found.out, ::testing::Each(std::byte{0xff}));
  }
}

/// Which calls may begin early, and that others say so.
TEST(KeyArrivals, AreForCallsWhoseKernelWaits) {
  LONGSPAN_NEEDS_HOPPER();
  const Case c{.q_lens = {40}, .kv_lens = {300}, .seed = fresh_seed()};
  const Data data(c);
  const LateKeys late(c, data, {Layout::zigzag, 0, 2, 300}, 1);
  const auto backend = kernels::cuda_backend();
  OwnStream stream;
  kernels::MergeParams result;
  result.states = late.params().state;
  result.heads = c.heads;
  result.tokens = c.tokens();
  result.dtype = c.dtype;
  OnGpu<std::byte> out(static_cast<std::size_t>(c.tokens() * c.heads * c.dim) * size_of(c.dtype));
  result.out = {out.data(), std::int64_t{c.heads} * c.dim, c.dim};
  const auto takes = [&](const auto& change) {
    kernels::AttendParams p = late.params();
    kernels::MergeParams m = result;
    change(p, m);
    const bool taken = backend->takes_arrivals(p, m, {stream});
    if (!taken && p.arrivals != nullptr) {
      EXPECT_THROW(backend->attend(p, m, {stream}), InputError);
    }
    return taken;
  };
  using Attend = kernels::AttendParams;
  using Merge = kernels::MergeParams;
  EXPECT_TRUE(takes([](Attend&, Merge&) {}));
  EXPECT_FALSE(takes([](Attend& p, Merge&) { p.arrivals = nullptr; }));
  EXPECT_FALSE(takes([](Attend& p, Merge&) { p.tokens = KeyArrivals::kLeastRows - 1; }));
  EXPECT_TRUE(takes([](Attend& p, Merge&) { p.tokens = KeyArrivals::kLeastRows; }));
  EXPECT_FALSE(takes([](Attend& p, Merge&) { p.invariant = true; }));
  EXPECT_FALSE(takes([](Attend& p, Merge&) { p.resume = true; }));
  EXPECT_FALSE(takes([](Attend& p, Merge&) { p.shard.ranks = 2; }));
  EXPECT_FALSE(takes([](Attend& p, Merge&) { p.score.scale = -1; }));
  EXPECT_FALSE(takes([](Attend&, Merge& m) { m.dtype = DType::fp32; }));
  KeyArrivals odd = late.arrivals();  // own keys at an address that TMA does not take
  odd.k.data = static_cast<std::byte*>(odd.k.data) + 2;
  EXPECT_FALSE(takes([&](Attend& p, Merge&) { p.arrivals = &odd; }));
  EXPECT_THROW(backend->attend(late.params(), {stream}), InputError);

  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_FALSE(takes([](Attend&, Merge&) {}));
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

}  // namespace
}  // namespace longspan::test
