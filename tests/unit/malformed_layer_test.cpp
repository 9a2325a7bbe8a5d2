// Random malformed arguments to a layer: its options, runs and appends, and attend().
#include "tests/unit/malformed.hpp"

#if defined(__SANITIZE_ADDRESS__)
/// Memory that there is not is refused by an Error, which the sanitizer is not to end first.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
#endif

namespace longspan {
namespace {

Options layer_options() {
  return {.heads = kHeads,
          .kv_heads = kKvHeads,
          .head_dim = kDim,
          .dtype = fp32,
          .mask = {.causal = true},
          .max_tokens = kTokens,
          .max_batch = kBatch,
          .threads = 2};
}

Request layer_request(Memory& m, Chaos& c) {
  Request r{.q = m.rows(m.q, kHeads),
            .k = m.pages(m.k),
            .v = m.pages(m.v),
            .shard = Shard::contiguous(0, 0, 1),
            .out = m.rows(m.out, kHeads),
            .lse = m.out_lse().tensor,
            .batch = kBatch,
            .query_start = m.query_start.data(),
            .kv_len = m.kv_len.data(),
            .block_table = {m.table.data(), kColumns}};
  if (c.once_in(3)) {  // contiguous, each sequence from the start of its row, or packed
    r.block_table = {};
    r.k.dims = r.v.dims = 4;
    r.k.shape = r.v.shape = {2, kKeys, kKvHeads, kDim};
    r.k.stride[0] = r.v.stride[0] = kKeys * kKvHeads * kDim;
    if (c.once_in(2)) {
      r.k = Tensor(m.k.data(), fp32, {kKeys, kKvHeads, kDim});
      r.v = Tensor(m.v.data(), fp32, {kKeys, kKvHeads, kDim});
    }
  }
  if (c.once_in(3)) {
    r.new_k = m.rows(m.new_k, kKvHeads);
    r.new_v = m.rows(m.new_v, kKvHeads);
  }
  return r;
}

TEST_F(Malformed, RunsAndAppendsOfALayer) {
  Attention layer(self(), layer_options());
  Options sharded = layer_options();
  sharded.shard_queries = true;
  Attention rows(self(), sharded);
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    Chaos& c = chaos_;
    Request r = layer_request(m, c);
    r.query_shard = Shard::contiguous(kTokens, 0, 1);
    apply({[&] { c.tensor(r.q); },
           [&] { c.tensor(r.k); },
           [&] { c.tensor(r.v); },
           [&] { c.tensor(r.out); },
           [&] { c.tensor(r.lse); },
           [&] { c.tensor(r.new_k); },
           [&] { c.tensor(r.new_v); },
           [&] {
             r.out.data = c.of({r.q.data, r.k.data, r.v.data, r.lse.data});
           },
           [&] {
             r.k.stride[0] = r.v.stride[0] = c.of<std::int64_t>({0, -64, 1, 64, kMost});
           },
           [&] { r.v.data = r.k.data; },
           [&] { c.shard(r.shard); },
           [&] { c.shard(r.query_shard); },
           [&] { r.shard = {Layout::ranges, 0, 1, 33, 1, m.numbers.data()}; },
           [&] { r.shard = {Layout::listed, 0, 1, 33, 1, m.numbers.data(), 4}; },
           [&] { c.entry(m.numbers); },
           [&] {
             r.batch = c.of({std::numeric_limits<int>::min(), -1, 0, 1, 2});
           },
           [&] { r.query_start = nullptr; },
           [&] { r.kv_len = nullptr; },
           [&] { c.entry(m.query_start); },
           [&] { c.entry(m.kv_len); },
           [&] { c.entry(m.table); },
           [&] {
             r.block_table.columns = c.of<std::int64_t>({kLeast, -1, 0, 1, kMost});
           },
           [&] {
             r.block_table.row_stride = c.of<std::int64_t>({kLeast, -1, 0, kMost});
           },
           [&] { c.scales(r.q_scale, m.one); },
           [&] { c.scales(r.k_scale, m.one); },
           [&] { c.scales(r.v_scale, m.one); },
           [&] { r.out_scale = m.one.data(), m.one[0] = c.number(); },
           [&] { r.sinks = m.sinks.data(), m.sinks[1] = c.number(); },
           [&] { r.slopes = m.sinks.data(); },
           [&] { r.causal = m.causal.data(); },
           [&] {
             r.documents = {m.numbers.data(), c.of<std::int64_t>({kLeast, -1, 0, 1, 3})};
           },
           [&] {
             r.qq_bias = {m.qq.data(), c.of<std::int64_t>({-1, 0, 1, 3, kMost}), 3};
           },
           [&] { r.skip_decode = true; }});
    attempt(m, [&] { layer.run(r); });
    attempt(m, [&] { rows.run(r); });
    attempt(m, [&] {
      layer.append({r.new_k, r.new_v, r.k, r.v, r.block_table, r.shard, r.batch, r.query_start,
                    r.kv_len, r.k_scale, r.v_scale});
    });
    if (round % 8 == 0) {
      Options options{.mask = {.causal = true}, .threads = 1};
      options.shard_queries = c.once_in(3);
      attempt(m, [&] { attend(self(), r, options); });
    }
  }
}

TEST_F(Malformed, OptionsOfALayer) {
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    Chaos& c = chaos_;
    Options o = layer_options();
    o.threads = 1;
    apply({[&] {
             o.heads = c.of({-4, 0, 1, 3, std::numeric_limits<int>::max()});
           },
           [&] {
             o.kv_heads = c.of({-2, 0, 1, 3, std::numeric_limits<int>::max()});
           },
           [&] {
             o.head_dim = c.of({-32, 0, 8, 20, 64, 576, 584, std::numeric_limits<int>::max()});
           },
           [&] {
             o.value_dim = c.of({-32, 0, 8, 20, 64, 512, 520});
           },
           [&] { o.dtype = c.dtype(); },
           [&] { o.query_dtype = c.dtype(); },
           [&] { o.kv_dtype = c.dtype(); },
           [&] { o.out_dtype = c.dtype(); },
           [&] { o.tf32 = true; },
           [&] { o.fp8_products = true; },
           [&] { c.mask(o.mask); },
           [&] { o.scale = c.number(); },
           [&] { o.softcap = c.number(); },
           [&] {
             o.alibi = static_cast<Alibi>(c.of({0, 1, 2, 255}));
           },
           [&] { o.max_tokens = c.count(); },
           [&] {
             o.max_batch = c.of({std::numeric_limits<int>::min(), -1, 0, 1, 1000});
           },
           [&] { o.max_kv_len = c.count(); },
           [&] { o.max_query_len = c.count(); },
           [&] { o.shard_queries = true; },
           [&] { o.invariant = true; },
           [&] { o.strategy = "pigeon"; },
           [&] { o.exchange = c.once_in(2) ? static_cast<Exchange>(77) : Exchange::windows; },
           [&] {
             o.threads = c.of({std::numeric_limits<int>::min(), -1, 0, 1, 3});
           },
           [&] { o.check_arrays = o.profile = true; }});
    attempt(m, [&] {
      Attention layer(self(), o);
      layer.run(layer_request(m, c));
      layer.wait();
    });
  }
}

}  // namespace
}  // namespace longspan
