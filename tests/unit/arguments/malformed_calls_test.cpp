// Random malformed arguments to the calls of class ServingOps, and to descriptions of data: shards,
// tensors, buffers.
#include "tests/support/malformed.hpp"

namespace longspan {
namespace {

TEST_F(Malformed, SegmentedAttention) {
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    auto a = m.paged<SegmentedAttention>(kernels_);
    if (chaos_.once_in(2)) {
      a.segments = m.segments();
      m.workspace = Buffer(Device::host, kernels_.workspace_bytes(a));
      a.attention.workspace = {m.workspace.data(), m.workspace.bytes()};
    }
    const auto change_segments = [&](Segments& s) {
      apply({[&] { chaos_.tensor(s.output); }, [&] { chaos_.tensor(s.max); },
             [&] { chaos_.tensor(s.expsum); }, [&] { s.keys = chaos_.count(); },
             [&] { s.keys = 12; },
             [&] {
               s.tile = chaos_.of({-1, 0, 1, kMostInt});
             },
             [&] { s.max.data = s.expsum.data; }, [&] { s.output.data = m.out.data(); }});
    };
    if (chaos_.once_in(3)) change_segments(a.segments);
    if (!chaos_.once_in(4)) change_paged(a, m);
    attempt(m, [&] { kernels_.segmented_attention(a); });
    attempt(m, [&] { kernels_.check(a); });
    attempt(m, [&] { kernels_.check(a.attention); });
    attempt(m, [&] { kernels_.workspace_bytes(a); });
  }
}

TEST_F(Malformed, ContextAttention) {
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    auto a = m.paged<ContextAttention>(kernels_);
    if (chaos_.once_in(3))
      apply({[&] { chaos_.tensor(a.k); }, [&] { chaos_.tensor(a.v); },
             [&] { a.skip_decode = true; }, [&] { a.attention.out.data = a.k.data; },
             [&] { a.out_scale_inv = Tensor(m.one.data(), {1}), m.one[0] = chaos_.number(); },
             [&] {
               a.out_scale_inv = Tensor(m.one.data(), {1});
               chaos_.tensor(a.out_scale_inv);
             }});
    if (!chaos_.once_in(4)) change_paged(a, m);
    attempt(m, [&] { kernels_.context_attention(a); });
    attempt(m, [&] { kernels_.check(a); });
    attempt(m, [&] { kernels_.workspace_bytes(a); });
  }
}

TEST_F(Malformed, ReduceSegments) {
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    std::vector<float> output = m.parts, max = m.lses, expsum = m.lses;
    output.resize(kTokens * kHeads * kSegments * kDim + kRoom);
    ReduceSegments a{.segments = {Tensor(output.data(), fp32, {kTokens, kHeads, kSegments, kDim}),
                                  Tensor(max.data(), fp32, {kTokens, kHeads, kSegments}),
                                  Tensor(expsum.data(), fp32, {kTokens, kHeads, kSegments})},
                     .out = m.tokens(m.out, kHeads),
                     .lse = m.out_lse(),
                     .query_start = m.starts(),
                     .kv_len = m.lengths()};
    Chaos& c = chaos_;
    apply({[&] { c.tensor(a.out); },
           [&] { c.tensor(a.lse.tensor); },
           [&] { c.tensor(a.segments.output); },
           [&] { c.tensor(a.segments.max); },
           [&] { c.tensor(a.segments.expsum); },
           [&] { a.segments.keys = c.count(); },
           [&] { a.segments.keys = 12; },
           [&] {
             a.segments.tile = c.of({-1, 0, 1, kMostInt});
           },
           [&] { a.out_scale = Tensor(m.one.data(), {1}), m.one[0] = c.number(); },
           [&] {
             a.out_scale = Tensor(m.one.data(), {1});
             c.tensor(a.out_scale);
           },
           [&] { c.tensor(a.query_start); },
           [&] { c.tensor(a.kv_len); },
           [&] { a.kv_len.shape[0] = 1, a.query_start.shape[0] = 2; },
           [&] { a.query_start = {}; },
           [&] { a.kv_len = {}; },
           [&] { c.entry(m.query_start); },
           [&] { c.entry(m.kv_len); },
           [&] { a.out.data = output.data(); },
           [&] { a.lse.tensor.data = a.out.data; },
           [&] { max[7] = c.number(); },
           [&] { expsum[7] = c.number(); }});
    attempt(m, [&] { kernels_.reduce_segments(a); });
    attempt(m, [&] { kernels_.check(a); });
  }
}

TEST_F(Malformed, Merges) {
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    Chaos& c = chaos_;
    const auto part = [&](int n) { return m.parts.data() + n * kTokens * kHeads * kDim; };
    const auto part_lse = [&](int n) {
      return Lse::tokens_heads(
          Tensor(m.lses.data() + n * kTokens * kHeads, fp32, {kTokens, kHeads}));
    };
    MergeAttnStates a{.out = m.tokens(m.out, kHeads),
                      .out_lse = m.out_lse(),
                      .prefix_out = Tensor(part(0), fp32, {kTokens, kHeads, kDim}),
                      .prefix_lse = part_lse(0),
                      .suffix_out = Tensor(part(1), fp32, {kTokens, kHeads, kDim}),
                      .suffix_lse = part_lse(1)};
    apply({[&] { c.tensor(a.out); }, [&] { c.tensor(a.out_lse.tensor); },
           [&] { c.tensor(a.prefix_out); }, [&] { c.tensor(a.suffix_out); },
           [&] { c.tensor(a.prefix_lse.tensor); }, [&] { c.tensor(a.suffix_lse.tensor); },
           [&] { a.prefix_out.dtype = c.dtype(), a.prefix_scale = Tensor(m.one.data(), {1}); },
           [&] { a.suffix_out.dtype = c.dtype(), a.suffix_scale = Tensor(m.one.data() + 1, {1}); },
           [&] { a.out.dtype = c.dtype(), a.out_scale = Tensor(m.one.data() + 2, {1}); },
           [&] { c.tensor(a.prefix_scale); }, [&] { c.tensor(a.suffix_scale); },
           [&] { c.tensor(a.out_scale); }, [&] { m.one[c.random() % 3] = c.number(); },
           [&] { a.prefill_tokens_with_context = c.count(); }, [&] { m.lses[3] = c.number(); },
           [&] {
             a.out.data = c.of({a.prefix_out.data, a.suffix_out.data, a.out_lse.tensor.data});
           },
           [&] {
             a.out_lse.tensor.data = c.of({a.prefix_lse.tensor.data, a.out.data});
           }});
    attempt(m, [&] { kernels_.merge_attn_states(a, c.of({LogBase::e, LogBase::two})); });

    MergeStates b{.out = m.tokens(m.out, kHeads),
                  .out_lse = m.out_lse(),
                  .parts = Tensor(part(0), fp32, {3, kTokens, kHeads, kDim}),
                  .lses = Lse::tokens_heads(Tensor(m.lses.data(), fp32, {3, kTokens, kHeads}))};
    apply({[&] { c.tensor(b.out); }, [&] { c.tensor(b.out_lse.tensor); },
           [&] { c.tensor(b.parts); }, [&] { c.tensor(b.lses.tensor); },
           [&] { b.parts.dtype = c.dtype(), b.part_scales = Tensor(m.one.data(), {3}); },
           [&] { c.tensor(b.part_scales); },
           [&] { b.out.dtype = c.dtype(), b.out_scale = Tensor(m.one.data() + 3, {1}); },
           [&] { c.tensor(b.out_scale); }, [&] { m.one[c.random() % kHeads] = c.number(); },
           [&] { b.out.data = b.parts.data; }, [&] { b.out_lse.tensor.data = b.lses.tensor.data; },
           [&] { b.nan_is_empty = true; }});
    attempt(m, [&] { kernels_.merge_states(b, c.of({LogBase::e, LogBase::two})); });
  }
}

TEST_F(Malformed, AppendKv) {
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    Chaos& c = chaos_;
    AppendKv a{.k = m.tokens(m.new_k, kKvHeads),
               .v = m.tokens(m.new_v, kKvHeads),
               .k_cache = m.pages(m.k),
               .v_cache = m.pages(m.v),
               .slots = Tensor(m.slots.data(), {kTokens})};
    apply({[&] { c.tensor(a.k); }, [&] { c.tensor(a.v); }, [&] { c.tensor(a.k_cache); },
           [&] { c.tensor(a.v_cache); }, [&] { c.entry(m.slots); }, [&] { a.slots = {}; },
           [&] { c.tensor(a.slots); }, [&] { c.scales(a.k_scale, m.one); },
           [&] { c.scales(a.v_scale, m.one); },
           [&] { a.k_cache.dtype = a.v_cache.dtype = c.dtype(); },
           [&] {
             a.k_cache.shape[0] = a.v_cache.shape[0] = c.of<std::int64_t>({0, 1, kMost});
           },
           [&] { a.k_cache.stride[1] = 0; }, [&] { a.v_cache.data = a.k_cache.data; },
           [&] { a.k.data = a.k_cache.data; }});
    attempt(m, [&] { kernels_.append_kv(a); });
    attempt(m, [&] { kernels_.check(a); });
  }
}

TEST_F(Malformed, WhatDescribesData) {
  Memory m(chaos_.random);
  Chaos& c = chaos_;
  for (int round = 0; round < kRounds; ++round) {
    const int rank = c.of({kLeastInt, -1, 0, 1, 2, 7}), ranks = c.of({-1, 0, 1, 2, 7, kMostInt});
    const std::int64_t length = c.count(), block = c.count();
    attempt(m, [&] {
      const Shard shard = c.of<std::function<Shard()>>(
          {[&] { return Shard::contiguous(length, rank, ranks); },
           [&] { return Shard::zigzag(length, rank, ranks); },
           [&] { return Shard::striped(length, rank, ranks); },
           [&] { return Shard::interleaved(length, rank, ranks, block); }})();
      const std::int64_t own = shard.local_len(length);
      EXPECT_TRUE(own >= 0 && own <= length && shard.max_local_len(length) >= own);
      EXPECT_TRUE(own == 0 || shard.position(own - 1, length) < length);
    });
    attempt(m, [&] {
      Sharding rule;
      c.sharding(rule);
      const Shard shard = rule.resolve(length, rank, ranks);
      const bool by_table = rule.layout == Layout::ranges || rule.layout == Layout::listed;
      const std::int64_t own = by_table ? 0 : shard.local_len(length);
      EXPECT_TRUE(own >= 0 && own <= length);
    });
    attempt(m, [&] { Shard::at_positions(length, rank, ranks, m.slots.data(), c.count()); });
    attempt(m, [&] { Shard::ranges(length, rank, ranks, m.slots.data()); });
    attempt(m, [&] {
      const Tensor t(m.q.data(), fp32, {c.count(), c.count(), c.of<std::int64_t>({0, 1, 5})});
      EXPECT_GE(t.size(), 0);
    });
    attempt(m, [&] { Tensor(m.q.data(), fp32, {1, 2, 3, 4, 5, 6, round % 2}); });
    Tensor t = m.tokens(m.q, kHeads);
    c.tensor(t);
    Lse::heads_tokens(t);
  }
  attempt(m, [&] { Buffer(Device::host, std::numeric_limits<std::size_t>::max() - 7); });
  attempt(m, [&] { Buffer(Device::host, 8).upload(nullptr); });
  attempt(m, [&] { Buffer(Device::host, 8).download(nullptr); });
  attempt(m, [&] { Buffer().upload(nullptr); });
  attempt(m, [&] { ServingOps(Device::host, -3); });
  EXPECT_GE(refused_, 4);
}

}  // namespace
}  // namespace longspan
