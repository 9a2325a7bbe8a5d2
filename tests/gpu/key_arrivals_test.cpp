// Attention that begins before the keys, and queries, of other ranks have come (KeyArrivals), and
// whose rows end in the memory of several ranks (RowPlaces): against float64 and the bits of a call
// that has all keys. Late data are NaN until they come, as is all memory that the call must not
// read.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "comm/cuda/stream_flags.hpp"
#include "longspan/error.hpp"
#include "src/base/divided_up.hpp"
#include "src/strategy/shared/sent_rows.hpp"
#include "tests/gpu/own_stream.hpp"
#include "tests/gpu/sm90_run.hpp"

namespace longspan::test {
namespace {

using kernels::KeyArrivals;

/// The parts of a call that involve other ranks.
enum class Others {
  send_keys,  // as in gather-kv
  send_all    // as in heads: keys and queries, and they get the finished rows
};

/// One rank's call, and the others, which each send it their data in some pieces.
class LateRows {
 public:
  LateRows(const Case& c, const Data& data, const Shard& shard, int pieces, Others others)
      : c_(c),
        shard_(shard),
        others_(others),
        whole_(c, data),
        q_(data.q.size()),
        k_(data.k[0].size()),
        v_(data.v[0].size()),
        all_q_(data.q),
        all_k_(data.k[0]),
        all_v_(data.v[0]) {
    for (int rank = 0; rank < shard.ranks; ++rank) {
      keys_.push_back(*stretches_of(shard.with_rank(rank), keys()));
      rows_.push_back(*stretches_of(shard.with_rank(rank), rows()));
    }
    // A call may have queries of a group in several pieces where queries come too.
    const int unit = others == Others::send_all ? 1 : c.heads / c.kv_heads;
    arrivals_.heads_a_piece = unit * static_cast<int>(divided_up(c.heads / unit, pieces));
    pieces_ = at(divided_up(c.heads, arrivals_.heads_a_piece));
    flags_ = OnGpu<PutFlags>(std::vector<PutFlags>(static_cast<std::size_t>(shard.ranks)));
    words_ = OnGpu<std::uint64_t>(static_cast<std::size_t>(shard.ranks));
    report_ = OnGpu<std::uint64_t>(std::vector<std::uint64_t>{0});
    std::vector<std::byte> k, v;
    const auto append = [](std::vector<std::byte>& to, const std::vector<std::byte>& from,
                           const Stretch& rows, std::int64_t bytes) {
      to.insert(to.end(), from.begin() + rows.position * bytes,
                from.begin() + (rows.position + rows.count) * bytes);
    };
    for (const Stretch& one : own(keys_)) {
      append(k, data.k[0], one, c.kv_heads * head_bytes());
      append(v, data.v[0], one, c.kv_heads * value_bytes());
    }
    own_k_ = OnGpu<std::byte>(k);
    own_v_ = OnGpu<std::byte>(v);
    arrivals_.flags = flags_.data() + shard.rank;
    arrivals_.rank = shard.rank;
    arrivals_.ranks = shard.ranks;
    arrivals_.k = rows_of(own_k_, c.dim);
    arrivals_.v = rows_of(own_v_, c.of_value());
    arrivals_.portions = list_portions(keys_, shard.rank, arrivals_.portion);
    if (others == Others::send_all) {
      arrivals_.query_portions = list_portions(rows_, shard.rank, arrivals_.query_portion);
      find_places();
    }
  }

  const KeyArrivals& arrivals() const { return arrivals_; }

  kernels::AttendParams params() const {
    kernels::AttendParams p = whole_.params();
    if (others_ == Others::send_all) p.q.data = q_.data();
    p.k = rows_of(k_, c_.dim);
    p.v = rows_of(v_, c_.of_value());
    p.batch = {};
    p.shard = {.length = keys()};
    p.arrivals = &arrivals_;
    return p;
  }

  /// Queues the call first, and then the data that it waits for. `words`: the ranks' digests of the
  /// run.
  Result run(const std::vector<std::uint64_t>& words) {
    OwnStream computes, sends;
    const OnGpu<std::uint64_t> digests(words);
    const kernels::sm90::Finished finished = finished_rows();
    send_digest(digests, shard_.rank, computes);
    kernels::sm90::attend(params(), finished, 0, computes);
    if (count_rows(own(keys_)) < keys()) computes.expect_waits();
    for (std::size_t piece = 0; piece <= pieces_; ++piece)
      for (int rank = 0; rank < shard_.ranks; ++rank) {
        if (piece == 0 && rank != shard_.rank) send_digest(digests, rank, sends);
        send(piece, rank, sends);
      }
    sends.wait();
    computes.wait();
    return result();
  }
  Result run() { return run(equal_words()); }

  /// The same where a kernel of each rank puts that rank's data. The own kernel runs right before
  /// the call, which begins beside it.
  Result run_beside_puts() {
    OwnStream computes;
    std::vector<OwnStream> puts(at(shard_.ranks));  // since each waits until all have room
    words_.poison();
    const OnGpu<unsigned> done(std::vector<unsigned>(
        static_cast<std::size_t>(shard_.ranks * kernels::RowPuts::kMostPieces), 0));
    const OnGpu<std::uint64_t> words_elsewhere(at(shard_.ranks * shard_.ranks));
    const kernels::sm90::Finished finished = finished_rows();
    const auto backend = kernels::cuda_backend();
    for (int i = 1; i <= shard_.ranks; ++i) {
      const int rank = (shard_.rank + i) % shard_.ranks;
      const cudaStream_t stream = rank == shard_.rank ? computes : puts[at(rank)];
      kernels::RowPuts put = puts_of(rank, done.data() + rank * kernels::RowPuts::kMostPieces);
      put.digest = {equal_words()[at(rank)], nullptr, words_.data() + rank};
      for (int p = 0; p < shard_.ranks; ++p)
        put.digests[p] = p == shard_.rank ? words_.data() + rank
                                          : words_elsewhere.data() + p * shard_.ranks + rank;
      put.beside = true;
      backend->put_rows(put, {stream});
    }
    arrivals_.behind_puts = true;
    kernels::sm90::attend(params(), finished, 0, computes);
    arrivals_.behind_puts = false;
    for (const OwnStream& stream : puts) stream.wait();
    computes.wait();
    ++runs_;
    for (const PutFlags& flags : flags_.values(at(shard_.ranks))) {
      EXPECT_THAT(std::span(flags.here, at(shard_.ranks)), ::testing::Each(runs_ * PutFlags::kRun));
      EXPECT_EQ(flags.runs, runs_);
    }
    return result();
  }

  /// Whether the pieces are such as a kernel puts (whole groups, or equal parts of one), and the
  /// kernels of all ranks, which wait for each other, fit on one GPU beside the call.
  bool fits_puts() const {
    if (shard_.ranks > 4) return false;
    const int some = arrivals_.heads_a_piece, group = c_.heads / c_.kv_heads;
    return some % group == 0 || group % some == 0;
  }

  /// The call's report about the words.
  std::uint64_t report() const { return report_.values(1)[0]; }
  static constexpr std::uint32_t kRun = 5;

 private:
  std::vector<std::uint64_t> equal_words() const {
    return std::vector<std::uint64_t>(static_cast<std::size_t>(shard_.ranks), 11);
  }

  /// The memory of a call's results, poisoned before the call. No data are on their way.
  kernels::sm90::Finished finished_rows() {
    kernels::sm90::Finished finished = whole_.poisoned();
    finished.headers = {words_.data(), shard_.rank, shard_.ranks, kRun, report_.data()};
    if (others_ == Others::send_all) {
      there_.poison();
      finished.places = places_;
    }
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // since streams of tests wait for no other
    return finished;
  }
  Result result() const {
    const Result here = whole_.result();
    if (others_ == Others::send_keys) return here;
    EXPECT_THAT(here.out, ::testing::Each(std::byte{0xff}));
    return gathered(here);
  }

  /// A rank's data, put here.
  kernels::RowPuts puts_of(int rank, unsigned* done) const {
    kernels::RowPuts puts;
    puts.pieces = static_cast<int>(pieces_);
    puts.among = {.rank = rank, .ranks = shard_.ranks};
    for (int p = 0; p < shard_.ranks; ++p) puts.among.flags[p] = flags_.data() + p;
    puts.done = done;
    const int some = arrivals_.heads_a_piece, group = c_.heads / c_.kv_heads;
    const auto put = [&](const OnGpu<std::byte>& to, const OnGpu<std::byte>& from,
                         const Stretch& rows, std::int64_t head, int all_heads, int heads,
                         int every) {
      const std::int64_t row_bytes = all_heads * head, first = rows.position * row_bytes;
      puts.add(
          {from.data() + first, to.data() + first, row_bytes, row_bytes, row_bytes, rows.count},
          heads * head, every);
    };
    if (others_ == Others::send_all)
      for (const Stretch& one : rows_[at(rank)])
        put(q_, all_q_, one, head_bytes(), c_.heads, some, 1);
    const std::vector<Stretch>& all = keys_[at(rank)];
    const int heads = std::max(some / group, 1), every = std::max(group / some, 1);
    for (const Stretch& one : rank == shard_.rank ? ends_of(all, KeyArrivals::kMargin) : all) {
      put(k_, all_k_, one, head_bytes(), c_.kv_heads, heads, every);
      put(v_, all_v_, one, value_bytes(), c_.kv_heads, heads, every);
    }
    puts.divide();
    return puts;
  }

  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  std::int64_t keys() const { return c_.kv_lens[0]; }
  std::int64_t rows() const { return c_.q_lens[0]; }
  std::int64_t element() const { return static_cast<std::int64_t>(size_of(c_.dtype)); }
  std::int64_t head_bytes() const { return c_.dim * element(); }
  std::int64_t value_bytes() const { return c_.of_value() * element(); }
  std::int64_t out_bytes() const { return c_.heads * value_bytes(); }
  const std::vector<Stretch>& own(const StretchesOfRanks& all) const {
    return all[at(shard_.rank)];
  }
  kernels::KvRows rows_of(const OnGpu<std::byte>& memory, int dim) const {
    return {memory.data(), std::int64_t{c_.kv_heads} * dim, dim};
  }

  /// Every rank gets its own rows and lse. The last rank's come first, and after each rank's rows
  /// [rows, heads, dim] come their lse [heads, rows].
  void find_places() {
    std::int64_t bytes = 0;
    starts_.resize(at(shard_.ranks));
    for (int rank = shard_.ranks - 1; rank >= 0; --rank) {
      starts_[at(rank)] = bytes;
      const std::int64_t count = count_rows(rows_[at(rank)]);
      bytes += (count * (out_bytes() + c_.heads * 4) + 15) / 16 * 16;
    }
    there_ = OnGpu<std::byte>(at(bytes));
    for (std::int64_t row = 0; row < rows(); ++row)
      for (int rank = 0; rank < shard_.ranks; ++rank)
        for (const Stretch& one : rows_[at(rank)])
          if (one.position == row)  // so that they ascend
            places_.stretch[places_.stretches++] = {
                static_cast<int>(row), there_.data() + starts_[at(rank)] + one.first * out_bytes(),
                reinterpret_cast<float*>(there_.data() + lse_at(rank)) + one.first,
                count_rows(rows_[at(rank)])};
  }
  /// The place of a rank's lse, in bytes.
  std::int64_t lse_at(int rank) const {
    return starts_[at(rank)] + count_rows(rows_[at(rank)]) * out_bytes();
  }

  /// The rows of all ranks, in the order of the sequence.
  Result gathered(Result result) const {
    const std::vector<std::byte> there = there_.values(there_.buffer.bytes());
    for (int rank = 0; rank < shard_.ranks; ++rank) {
      const std::int64_t count = count_rows(rows_[at(rank)]);
      for (const Stretch& one : rows_[at(rank)])
        for (std::int64_t i = 0; i < one.count; ++i) {
          std::copy_n(there.begin() + starts_[at(rank)] + (one.first + i) * out_bytes(),
                      out_bytes(), result.out.begin() + (one.position + i) * out_bytes());
          for (int h = 0; h < c_.heads; ++h)
            std::memcpy(&result.lse[at((one.position + i) * c_.heads + h)],
                        there.data() + lse_at(rank) + (h * count + one.first + i) * 4, 4);
        }
    }
    return result;
  }

  /// Copies the heads [begin, end) of `heads` of some rows.
  static void copy_heads(const OnGpu<std::byte>& to, const OnGpu<std::byte>& from,
                         const Stretch& rows, std::int64_t head, int heads, int begin, int end,
                         cudaStream_t stream) {
    const std::int64_t row = heads * head;
    const std::int64_t first = rows.position * row + begin * head;
    if (begin == end || rows.count == 0) return;
    EXPECT_EQ(cudaMemcpy2DAsync(to.data() + first, at(row), from.data() + first, at(row),
                                at((end - begin) * head), at(rows.count), cudaMemcpyDeviceToDevice,
                                stream),
              cudaSuccess);
  }
  /// The data that a rank sends in one piece of heads; for own keys, which are read in place, the
  /// data that must come nevertheless.
  void send_heads(std::size_t piece, int rank, cudaStream_t stream) const {
    const int some = arrivals_.heads_a_piece, group = c_.heads / c_.kv_heads;
    const int begin = static_cast<int>(piece - 1) * some, end = std::min(begin + some, c_.heads);
    if (others_ == Others::send_all)
      for (const Stretch& one : rows_[at(rank)])
        copy_heads(q_, all_q_, one, head_bytes(), c_.heads, begin, end, stream);
    const auto kv = [&](int head) { return static_cast<int>(divided_up(head, group)); };
    const std::vector<Stretch>& all = keys_[at(rank)];
    for (const Stretch& one : rank == shard_.rank ? ends_of(all, KeyArrivals::kMargin) : all) {
      copy_heads(k_, all_k_, one, head_bytes(), c_.kv_heads, kv(begin), kv(end), stream);
      copy_heads(v_, all_v_, one, value_bytes(), c_.kv_heads, kv(begin), kv(end), stream);
    }
  }

  void send_digest(const OnGpu<std::uint64_t>& digests, int rank, cudaStream_t stream) {
    EXPECT_EQ(cudaMemcpyAsync(words_.data() + rank, digests.data() + rank, sizeof(std::uint64_t),
                              cudaMemcpyDeviceToDevice, stream),
              cudaSuccess);
  }

  void send(std::size_t piece, int rank, cudaStream_t stream) {
    if (piece > 0) send_heads(piece, rank, stream);
    comm::queue_flags(stream,
                      {{comm::FlagOperation::raise,
                        reinterpret_cast<std::byte*>(flags_.data()[shard_.rank].here + rank),
                        static_cast<unsigned>(1 + piece)}});
  }

  Case c_;
  Shard shard_;
  Others others_;
  Sm90Run whole_;               // has queries and results
  OnGpu<std::byte> q_, k_, v_;  // in the call's form
  OnGpu<std::byte> all_q_, all_k_, all_v_, own_k_, own_v_;
  OnGpu<PutFlags> flags_;  // of each rank
  OnGpu<std::uint64_t> words_, report_;
  std::uint64_t runs_ = 0;  // beside puts
  StretchesOfRanks keys_, rows_;
  std::size_t pieces_ = 0;            // in which each rank sends
  OnGpu<std::byte> there_;            // rows and lse of all ranks
  std::vector<std::int64_t> starts_;  // of each rank in it
  kernels::RowPlaces places_;
  KeyArrivals arrivals_;
};

void expect_as_if_all_were_there(const Case& c, const Shard& shard, int pieces, int stride = 3) {
  if (is_left_out(4 * kOnHopper * work_of(c))) return;
  const Data data(c);
  const Result whole = Sm90Run(c, data).finish();
  for (const Others others : {Others::send_keys, Others::send_all}) {
    SCOPED_TRACE(::testing::Message()
                 << c << " rank " << shard.rank << " of " << shard.ranks << " "
                 << name(shard.layout) << ", pieces " << pieces
                 << (others == Others::send_all ? " of keys and queries" : " of keys"));
    LateRows late(c, data, shard, pieces, others);
    const auto takes_arrivals = family_of_long(late.params()).takes_arrivals;
    ASSERT_TRUE(takes_arrivals != nullptr && takes_arrivals(late.params()));
    const Result found = late.run();
    expect_within_rounding(c, data, found, stride);
    EXPECT_EQ(found.out, whole.out);
    EXPECT_EQ(found.lse, whole.lse);
    EXPECT_EQ(late.report(), 0u);
    LateRows put(c, data, shard, pieces, others);
    if (!put.fits_puts()) continue;
    for (int run = 0; run < 2; ++run) {  // counters go on
      const Result beside = put.run_beside_puts();
      EXPECT_EQ(beside.out, whole.out);
      EXPECT_EQ(beside.lse, whole.lse);
      EXPECT_EQ(put.report(), 0u);
    }
  }
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

/// A whole prefill: some rows see only own keys and run before the others, in sections of heads.
TEST(KeyArrivals, RowsThatSeeOwnKeysAlone) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int ranks : {2, 3})
    for (const int heads : {1, 3}) {
      const int rows = 2 * ranks * 150;
      const Case c{.heads = heads,
                   .kv_heads = heads,
                   .dim = 128,
                   .q_lens = {rows},
                   .kv_lens = {rows},
                   .mask = {.causal = true},
                   .seed = fresh_seed()};
      expect_as_if_all_were_there(c, {Layout::zigzag, 0, ranks, rows}, heads);
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
    for (const auto& [dim, value_dim] : {std::pair{64, 64},
                                         {80, 80},
                                         {96, 96},
                                         {96, 64},
                                         {128, 128},
                                         {192, 128},
                                         {192, 192},
                                         {256, 256}})
      for (const Mask& mask : kMasks)
        for (const float softcap : {0.0f, 20.0f}) {
          Case c{.dtype = dtype,
                 .heads = 3,
                 .kv_heads = 3,
                 .dim = dim,
                 .value_dim = value_dim,
                 .q_lens = {250},
                 .kv_lens = {900},
                 .mask = mask,
                 .softcap = softcap,
                 .seed = fresh_seed()};
          if (softcap == 0.0f && mask.window == 0) c.alibi = Alibi::query;
          expect_as_if_all_were_there(c, {Layout::zigzag, dim % 3 == 0 ? 0 : 1, 2, 900}, 2, 7);
        }
}

/// The ranks' digests of the run come late too, and are compared before anything is written.
TEST(KeyArrivals, CompareWhatRanksSay) {
  LONGSPAN_NEEDS_HOPPER();
  for (const int other : {0, 2}) {
    const Case c{.q_lens = {140}, .kv_lens = {1000}, .seed = fresh_seed()};
    const Data data(c);
    LateRows late(c, data, {Layout::zigzag, 1, 3, 1000}, 1, Others::send_keys);
    std::vector<std::uint64_t> words(3, 11);
    words[static_cast<std::size_t>(other)] = 12;
    const Result found = late.run(words);
    EXPECT_EQ(late.report(), kernels::RunHeaders::reported(LateRows::kRun, other));
    EXPECT_THAT(found.out, ::testing::Each(std::byte{0xff}));
  }
}

/// Which calls may begin early, and that others report it.
TEST(KeyArrivals, AreForCallsWhoseKernelWaits) {
  LONGSPAN_NEEDS_HOPPER();
  const Case c{.q_lens = {40}, .kv_lens = {300}, .seed = fresh_seed()};
  const Data data(c);
  const LateRows late(c, data, {Layout::zigzag, 0, 2, 300}, 1, Others::send_keys);
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
    const bool taken = backend->takes_arrivals(p, m);
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
  KeyArrivals odd = late.arrivals();  // own keys at an address that TMA does not support
  odd.k.data = static_cast<std::byte*>(odd.k.data) + 2;
  EXPECT_FALSE(takes([&](Attend& p, Merge&) { p.arrivals = &odd; }));
  EXPECT_THROW(backend->attend(late.params(), {stream}), InputError);
  kernels::RowPlaces places;  // for a call that ends in one place
  EXPECT_TRUE(takes([&](Attend&, Merge& m) { m.places = &places; }));
  kernels::AttendParams all_here = late.params();
  all_here.arrivals = nullptr;
  kernels::MergeParams elsewhere = result;
  elsewhere.places = &places;
  EXPECT_THROW(backend->attend(all_here, elsewhere, {stream}), InputError);
}

}  // namespace
}  // namespace longspan::test
