// Random malformed arguments to the move of a cache: its options, and caches of every form.
#include "longspan/reshard.hpp"
#include "tests/support/malformed.hpp"

namespace longspan {
namespace {

class MalformedReshard : public Malformed {
 protected:
  static ReshardOptions options() {
    return {
        .kv_heads = kKvHeads, .head_dim = kDim, .dtype = fp32, .lengths = {20, 33}, .threads = 1};
  }

  std::vector<float> to_k_, to_v_;
  std::vector<std::int32_t> to_table_;

  /// A cache of kBatch sequences: packed, of one capacity, or in pages, in rows or x-packed.
  CacheTensors cache(std::vector<float>& k, std::vector<float>& v,
                     std::vector<std::int32_t>& table) {
    switch (chaos_.random() % 4) {
      case 0:
        return {Tensor(k.data(), {kKeys, kKvHeads, kDim}),
                Tensor(v.data(), {kKeys, kKvHeads, kDim})};
      case 1:
        return {Tensor(k.data(), {kBatch, kKeys, kKvHeads, kDim}),
                Tensor(v.data(), {kBatch, kKeys, kKvHeads, kDim})};
      case 2:
        return {Tensor(k.data(), {kPages, kPage, kKvHeads, kDim}),
                Tensor(v.data(), {kPages, kPage, kKvHeads, kDim}),
                Tensor(table.data(), {kBatch, kColumns})};
      default:
        return {Tensor(k.data(), {kPages, kKvHeads, kDim / 8, kPage, 8}),
                Tensor(v.data(), {kPages, kKvHeads, kDim, kPage}),
                Tensor(table.data(), {kBatch, kColumns})};
    }
  }
  ReshardArgs args(Memory& m) {
    to_k_.assign(m.k.size(), NAN);
    to_v_.assign(m.v.size(), NAN);
    to_table_ = m.table;
    return {.from = cache(m.k, m.v, m.table), .to = cache(to_k_, to_v_, to_table_)};
  }
  /// Moves; a refused move has written nothing. Where the two caches share memory, what was read
  /// has been written.
  void attempt_move(Memory& m, Reshard& move, const ReshardArgs& a, bool in_place) {
    const int refused = refused_;
    const std::vector<float> k = m.k, v = m.v;
    attempt(m, [&] {
      move.run(a), move.wait();
      EXPECT_TRUE(in_place || (same(m.k, k) && same(m.v, v))) << "seed " << seed_;
    });
    if (refused_ == refused) return;
    for (const std::vector<float>* to : {&to_k_, &to_v_})
      EXPECT_TRUE(Memory::is_poison(*to)) << "seed " << seed_;
  }
};

TEST_F(MalformedReshard, Moves) {
  std::vector<Reshard> moves;
  for (const Layout layout : {Layout::contiguous, Layout::zigzag, Layout::interleaved}) {
    ReshardOptions o = options();
    o.from.rule.layout = layout;
    moves.emplace_back(self(), o);
    o.value_dim = 0;
    moves.emplace_back(self(), o);
  }
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    Chaos& c = chaos_;
    Reshard& move = moves[c.random() % moves.size()];
    ReshardArgs a = args(m);
    bool in_place = false;
    if (move.options().of_values() == 0) a.from.v = a.to.v = {};
    std::vector<Change> changes;
    for (CacheTensors* side : {&a.from, &a.to})
      for (const Change& change : std::initializer_list<Change>{
               [&c, side] { c.tensor(side->k); }, [&c, side] { c.tensor(side->v); },
               [&c, side] { c.tensor(side->k), side->v = side->k; },
               [&c, side] { c.tensor(side->block_table); }, [side] { side->block_table = {}; },
               [&c, side] {
                 side->k.stride[0] = side->v.stride[0] =
                     c.of<std::int64_t>({0, 1, 64, kMost / 2, kMost});
               },
               [&c, side] { side->k.shape[0] = side->v.shape[0] = c.count(); },
               [side] { side->v.data = side->k.data; }})
        changes.push_back(change);
    for (const Change& change : std::initializer_list<Change>{
             [&] { c.entry(m.table); }, [&] { c.entry(to_table_); },
             [&] { a.to.v.data = a.to.k.data; }, [&] { a.to.block_table = a.from.block_table; },
             [&] { a.to.k = a.from.k, in_place = true; },
             [&] { std::swap(a.from, a.to), in_place = true; }})
      changes.push_back(change);
    if (!c.once_in(8)) apply(changes);
    attempt_move(m, move, a, in_place);
  }
}

TEST_F(MalformedReshard, OptionsOfAMove) {
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    Chaos& c = chaos_;
    ReshardOptions o = options();
    std::vector<Change> changes{
        [&] {
          o.kv_heads = c.of({kLeastInt, -1, 0, 1, 3, 1 << 16, kMostInt});
        },
        [&] {
          o.head_dim = c.of({kLeastInt, -1, 0, 1, 31, 1 << 16, kMostInt});
        },
        [&] {
          o.value_dim = c.of({kLeastInt, -1, 0, 1, 31, 1 << 16, kMostInt});
        },
        [&] { o.dtype = c.dtype(); },
        [&] { o.lengths.resize(c.random() % 4, c.count()); },
        [&] {
          o.lengths[0] = c.of<std::int64_t>({kLeast, -1, 0, 34, std::int64_t{1} << 42, kMost});
        },
        [&] {
          o.threads = c.of({kLeastInt, -1, 0, 1, 3, kMostInt});
        }};
    for (CacheRanks* side : {&o.from, &o.to})
      for (const Change& change : std::initializer_list<Change>{
               [&c, side] { c.sharding(side->rule); },
               [&c, side] {
                 side->first_rank = c.of({kLeastInt, -1, 0, 1, kMostInt});
               },
               [&c, side] {
                 side->ranks = c.of({kLeastInt, -1, 0, 1, 2, kMostInt});
               },
               [&c, side] {
                 side->rule.layout = Layout::ranges;
                 side->table = {0, 20, 0, c.of<std::int64_t>({-1, 0, 20, 33, kMost})};
               },
               [&c, side] { side->table.resize(c.random() % 5, c.count()); }})
        changes.push_back(change);
    apply(changes);
    attempt(m, [&] {
      Reshard move(self(), o);
      const ReshardArgs a = args(m);
      move.run(a);
      move.wait();
    });
  }
}

}  // namespace
}  // namespace longspan
