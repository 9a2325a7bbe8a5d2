// Random malformed arguments to states in and out, and to the merge across ranks of one rank.
#include <optional>

#include "longspan/merge.hpp"
#include "tests/support/malformed.hpp"

namespace longspan {
namespace {

class MalformedStates : public Malformed {
 protected:
  /// For a table of ranges; those of Memory are too short.
  std::vector<std::int64_t> ranges_ = with_room<std::int64_t>({0, 10, 20, 0, 10, 33});

  /// Keys in pages, one row for each sequence, or packed; all of them, or those of one of two
  /// ranks.
  AttendState attend(Memory& m) {
    Chaos& c = chaos_;
    AttendState a{.state = {m.state.data(), m.state.bytes()},
                  .resume = c.once_in(2),
                  .q = m.tokens(m.q, kHeads),
                  .k = m.pages(m.k),
                  .v = m.pages(m.v),
                  .block_table = m.block_table(),
                  .query_start = m.starts(),
                  .kv_len = m.lengths()};
    if (!c.once_in(3)) {
      a.block_table = {};
      a.k = Tensor(m.k.data(), {kKeys, kKvHeads, kDim});
      a.v = Tensor(m.v.data(), {kKeys, kKvHeads, kDim});
      if (c.once_in(2)) {
        a.k = Tensor(m.k.data(), {kBatch, kKeys, kKvHeads, kDim});
        a.v = Tensor(m.v.data(), {kBatch, kKeys, kKvHeads, kDim});
      }
    }
    ranges_ = with_room<std::int64_t>({0, 10, 20, 0, 10, 33});
    if (c.once_in(2)) a.keys.layout = static_cast<Layout>(c.random() % 6);
    if (a.keys.layout == Layout::listed || c.once_in(4)) take_one_sequence(a, m);
    if (a.keys.layout == Layout::listed) a.key_table = Tensor(m.numbers.data(), {2});
    if (c.once_in(2)) a.ranks = 2, a.rank = static_cast<int>(c.random() % 2);
    if (a.keys.layout == Layout::ranges) {
      const std::int64_t ends = a.ranks + 1;
      if (a.ranks == 1) ranges_ = with_room<std::int64_t>({0, 20, 0, 33});
      a.key_table = a.query_start ? Tensor(ranges_.data(), {kBatch, ends})
                                  : Tensor(ranges_.data() + ends, {ends});
    }
    m.workspace = Buffer(Device::host, kernels_.workspace_bytes(a) + 4096);
    a.workspace = {m.workspace.data(), m.workspace.bytes()};
    return a;
  }
  /// Memory with the states of a valid call.
  Buffer attended() {
    Buffer states(Device::host, ServingOps::state_bytes(kTokens, kHeads, kDim));
    Memory m(chaos_.random);
    AttendState a = attend(m);
    a.state = {states.data(), states.bytes()};
    a.resume = false;
    kernels_.attend_state(a);
    return states;
  }
  /// The second sequence, whose queries are all rows.
  void take_one_sequence(AttendState& a, Memory& m) {
    a.query_start = {};
    a.kv_len = Tensor(m.kv_len.data() + 1, {1});
    if (chaos_.once_in(2)) a.kv_len = {}, a.total_keys = 33;
  }
  void change_state(AttentionState& s) {
    Chaos& c = chaos_;
    if (c.once_in(3))
      s.data = nullptr;
    else if (c.once_in(2))
      s.data = static_cast<std::byte*>(s.data) + c.of({1, 64});  // never 256 in three changes
    else
      s.bytes = c.of<std::size_t>({0, 1, s.bytes - 1, std::size_t(kMost), ~std::size_t{}});
  }
};

TEST_F(MalformedStates, AttendState) {
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    Chaos& c = chaos_;
    AttendState a = attend(m);
    std::vector<Change> changes = changes_of_attention(a, m);
    for (const Change& change : std::initializer_list<Change>{
             [&] { change_state(a.state); },
             [&] {
               a.state.data = c.of({a.q.data, a.k.data, a.v.data, a.workspace.data});
             },
             [&] { a.resume = !a.resume; }, [&] { c.tensor(a.k); }, [&] { c.tensor(a.v); },
             [&] { c.tensor(a.k), a.v = a.k; }, [&] { a.v.data = a.k.data; },
             [&] {
               a.k.stride[0] = a.v.stride[0] = c.of<std::int64_t>({0, -64, 1, 64, kMost});
             },
             [&] {
               a.q = Tensor(m.q.data(), {c.of({0, 1, 2, 4}), kHeads, 1, kDim});
             },
             [&] {
               a.total_keys = c.of<std::int64_t>({kLeast, -1, 0, 1, 33, 1 << 20, kMost});
             },
             [&] { c.sharding(a.keys); },
             [&] {
               a.rank = c.of({kLeastInt, -1, 0, 1, 2, kMostInt});
             },
             [&] {
               a.ranks = c.of({kLeastInt, -1, 0, 1, 2, 3, 1 << 20, kMostInt});
             },
             [&] { c.tensor(a.key_table); },
             [&] {
               a.key_table = Tensor(ranges_.data(), {c.of<std::int64_t>({0, 1, 2, 3, 6})});
             },
             [&] { c.entry(ranges_); }, [&] { c.entry(m.numbers); },
             [&] { take_one_sequence(a, m); }})
      changes.push_back(change);
    if (!c.once_in(8)) apply(changes);
    attempt(m, [&] { kernels_.attend_state(a); });
    attempt(m, [&] { kernels_.check(a); });
    attempt(m, [&] { kernels_.workspace_bytes(a); });
  }
}

TEST_F(MalformedStates, FinishState) {
  const Buffer states = attended();
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    Chaos& c = chaos_;
    FinishState f{.state = {states.data(), states.bytes()},
                  .out = m.tokens(m.out, kHeads),
                  .lse = m.out_lse()};
    if (c.once_in(2)) f.query_start = m.starts();
    apply({[&] { change_state(f.state); }, [&] { c.tensor(f.out); },
           [&] { c.tensor(f.lse.tensor); },
           [&] { f.lse = c.once_in(2) ? Lse{} : Lse::heads_tokens(f.lse.tensor); },
           [&] {
             f.sinks = Tensor(m.sinks.data(), {kHeads}), m.sinks[1] = c.number();
             if (c.once_in(2)) c.tensor(f.sinks);
           },
           [&] { f.out_scale = Tensor(m.one.data(), {1}), m.one[0] = c.number(); },
           [&] {
             f.out_scale = Tensor(m.one.data(), {1});
             c.tensor(f.out_scale);
           },
           [&] { f.out.dtype = c.dtype(), f.out_scale = Tensor(m.one.data(), {1}); },
           [&] {
             f.out = Tensor(m.out.data(), {c.of({0, 1, 2, 4}), kHeads, 1, kDim});
           },
           [&] { f.query_start = m.starts(); },
           [&] {
             f.query_start = m.starts();
             c.tensor(f.query_start);
           },
           [&] { c.entry(m.query_start); }, [&] { f.out.data = f.state.data; },
           [&] {
             f.lse.tensor.data = c.of({f.out.data, f.state.data});
           }});
    attempt(m, [&] { kernels_.finish_state(f); });
  }
}

TEST_F(MalformedStates, ExportState) {
  const Buffer states = attended();
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    Chaos& c = chaos_;
    ExportState e{.state = {states.data(), states.bytes()},
                  .output = Tensor(m.seg_output.data(), {kTokens, kHeads, 1, kDim}),
                  .max = Tensor(m.seg_max.data(), {kTokens, kHeads, 1}),
                  .expsum = Tensor(m.seg_expsum.data(), {kTokens, kHeads, 1})};
    if (c.once_in(2)) e.query_start = m.starts();
    apply({[&] { change_state(e.state); }, [&] { c.tensor(e.output); }, [&] { c.tensor(e.max); },
           [&] { c.tensor(e.expsum); },
           [&] {
             e.value_dim = c.of({kLeastInt, -8, 0, 8, 12, 24, kDim, 40, 520, kMostInt});
           },
           [&] { e.query_start = m.starts(); },
           [&] {
             e.query_start = m.starts();
             c.tensor(e.query_start);
           },
           [&] { c.entry(m.query_start); }, [&] { e.output.data = e.state.data; },
           [&] {
             e.max.data = c.of({e.output.data, e.expsum.data, e.state.data});
           },
           [&] { e.expsum.data = e.output.data; }});
    attempt(m, [&] { kernels_.export_state(e); });
  }
}

TEST_F(MalformedStates, SizesOfStates) {
  Memory m(chaos_.random);
  Chaos& c = chaos_;
  for (int round = 0; round < kRounds; ++round)
    attempt(
        m, [&] { ServingOps::state_bytes(c.count(), c.count(), c.once_in(2) ? c.count() : kDim); });
}

MergeOptions merge_options() {
  return {.heads = kHeads, .value_dim = kDim, .dtype = fp32, .max_tokens = kTokens, .threads = 1};
}

TEST_F(MalformedStates, RunsOfAMergeAcrossRanks) {
  std::vector<CrossRankMerge> merges;
  for (const bool scatter : {false, true})
    for (const DType part : {fp32, bf16, e4m3})
      for (const DType out : {fp32, e5m2}) {
        MergeOptions o = merge_options();
        o.scatter_heads = scatter;
        o.dtype = part;
        o.out_dtype = out;
        o.nan_is_empty = chaos_.once_in(2);
        merges.emplace_back(self(), o, scatter ? LogBase::two : LogBase::e);
      }
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    Chaos& c = chaos_;
    CrossRankMerge& merge = merges[c.random() % merges.size()];
    MergeArgs a{.part = Tensor(m.parts.data(), merge.options().dtype, {kTokens, kHeads, kDim}),
                .part_lse = Lse::tokens_heads(Tensor(m.lses.data(), {kTokens, kHeads})),
                .out = Tensor(m.out.data(), merge.options().of_out(), {kTokens, kHeads, kDim}),
                .lse = m.out_lse()};
    if (is_fp8(a.part.dtype)) a.part_scale = Tensor(m.one.data(), {1});
    if (is_fp8(a.out.dtype)) a.out_scale = Tensor(m.one.data() + 1, {1});
    apply({[&] { c.tensor(a.part); }, [&] { c.tensor(a.part_lse.tensor); },
           [&] { c.tensor(a.out); }, [&] { c.tensor(a.lse.tensor); },
           [&] { a.lse = c.once_in(2) ? Lse{} : Lse::heads_tokens(a.lse.tensor); },
           [&] {
             a.part_scale = Tensor(m.one.data(), {c.of({0, 1, 2})});
           },
           [&] { c.tensor(a.part_scale); },
           [&] {
             a.out_scale = Tensor(m.one.data() + 1, {c.of({0, 1, 2})});
           },
           [&] { c.tensor(a.out_scale); }, [&] { m.one[c.random() % 2] = c.number(); },
           [&] { m.lses[3] = c.number(), m.parts[7] = c.number(); },
           [&] { a.part.shape[0] = a.part_lse.tensor.shape[0] = a.out.shape[0] = c.count(); },
           [&] {
             a.part = Tensor(m.parts.data(), fp32, {c.of({0, 1, 2, 4}), kHeads, 1, kDim});
           },
           [&] {
             a.out = Tensor(m.out.data(), fp32, {c.of({0, 1, 2, 4}), kHeads, 1, kDim});
           },
           [&] { a.out = a.part, a.lse = a.part_lse; },
           [&] {
             a.out.data = c.of({a.part.data, a.part_lse.tensor.data});
           },
           [&] {
             a.lse.tensor.data = c.of({a.part_lse.tensor.data, a.out.data, a.part.data});
           }});
    attempt(m, [&] { merge.run(a), merge.wait(); });
  }
}

TEST_F(MalformedStates, OptionsOfAMergeAcrossRanks) {
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    Chaos& c = chaos_;
    MergeOptions o = merge_options();
    LogBase base = LogBase::e;
    apply({[&] {
             o.heads = c.of({kLeastInt, -4, 0, 1, 3, kMostInt});
           },
           [&] {
             o.value_dim = c.of({kLeastInt, -32, 0, 1, 7, 31, 520, kMostInt});
           },
           [&] { o.dtype = c.dtype(); }, [&] { o.out_dtype = c.dtype(); },
           [&] { o.max_tokens = c.once_in(2) ? c.count() : std::int64_t{1} << 31; },
           [&] { o.scatter_heads = true; }, [&] { o.nan_is_empty = true; },
           [&] {
             o.threads = c.of({kLeastInt, -1, 0, 1, 3, kMostInt});
           },
           [&] {
             base = static_cast<LogBase>(c.of({0, 1, 2, 255}));
           }});
    attempt(m, [&] {
      CrossRankMerge merge(self(), o, base);
      merge.run({.part = m.tokens(m.parts, kHeads),
                 .part_lse = Lse::tokens_heads(Tensor(m.lses.data(), {kTokens, kHeads})),
                 .out = m.tokens(m.out, kHeads),
                 .lse = m.out_lse()});
      merge.wait();
    });
  }
}

}  // namespace
}  // namespace longspan
