// Class ServingOps: what it refuses, by name and with nothing written.
#include <cstdint>

#include "tests/support/serving_calls.hpp"

namespace longspan {
namespace {

/// The refusals of every attention over a paged cache.
template <class Args>
std::vector<Change<Args>> paged_refusals() {
  return {
      {"q is [4, 4]; [tokens, heads, head_dim] is wanted",
       [](Args& a, ServingCalls&) { a.attention.q.dims = 2; }},
      {"q has stride 2 in its last dimension",
       [](Args& a, ServingCalls&) { a.attention.q.stride[2] = 2; }},
      {"q is on the cuda", [](Args& a, ServingCalls&) { a.attention.q.device = Device::cuda; }},
      {"q [4, 4, 32] has no data", [](Args& a, ServingCalls&) { a.attention.q.data = nullptr; }},
      {"heads 3 must be a multiple of kv_heads 2",
       [](Args& a, ServingCalls&) { a.attention.q.shape[1] = 3; }},
      {"q is e4m3 and there is no q_scale",
       [](Args& a, ServingCalls&) {
         a.attention.q.dtype = e4m3, a.attention.dtypes.compute = fp32;
       }},
      {"dtypes.compute is e5m2; fp32, fp16 or bf16",
       [](Args& a, ServingCalls&) {
         a.attention.q.dtype = e4m3, a.attention.dtypes.compute = e5m2;
       }},
      {"k_cache is [9, 16, 2]; pages are",
       [](Args& a, ServingCalls&) { a.attention.k_cache.dims = 3; }},
      {"k_cache is bf16; fp32, or fp8",
       [](Args& a, ServingCalls&) { a.attention.k_cache.dtype = bf16; }},
      {"k_cache is e5m2 and there is no k_scale",
       [](Args& a, ServingCalls&) {
         a.attention.k_cache.dtype = a.attention.v_cache.dtype = e5m2;
       }},
      {"v_cache is e4m3 and there is no v_scale",
       [](Args& a, ServingCalls& p) {
         a.attention.k_cache.dtype = a.attention.v_cache.dtype = e4m3;
         a.attention.k_scale = Tensor(p.one.data(), {1});
       }},
      {"v_cache is e4m3; fp32 is wanted",
       [](Args& a, ServingCalls&) { a.attention.v_cache.dtype = e4m3; }},
      {"they must have one shape",
       [](Args& a, ServingCalls&) { a.attention.v_cache.shape[0] = 8; }},
      {"in x-packed pages",
       [](Args& a, ServingCalls& p) {
         a.attention.k_cache = Tensor(p.k_cache.data(), fp32, {kPages, kKvHeads, 5, kPage, 8});
       }},
      {"beside x-packed keys",
       [](Args& a, ServingCalls& p) {
         a.attention.k_cache =
             Tensor(p.k_cache.data(), fp32, {kPages, kKvHeads, kDim / 8, kPage, 8});
       }},
      {"block_table is missing", [](Args& a, ServingCalls&) { a.attention.block_table = {}; }},
      {"block_table[1][2] is 9, which is not a page",
       [](Args&, ServingCalls& p) { p.table[6] = kPages; }},
      {"block_table[0][0] is -1, which is not a page",
       [](Args&, ServingCalls& p) { p.table[0] = -1; }},
      {"there is room for 64 in its row of block_table",
       [](Args&, ServingCalls& p) { p.kv_len[1] = 80; }},
      {"kv_len[0] is -1", [](Args&, ServingCalls& p) { p.kv_len[0] = -1; }},
      {"kv_len is missing", [](Args& a, ServingCalls&) { a.attention.kv_len = {}; }},
      {"a batch of 2 sequences needs query_start",
       [](Args& a, ServingCalls&) { a.attention.query_start = {}; }},
      {"query_start[0] is 1", [](Args&, ServingCalls& p) { p.query_start[0] = 1; }},
      {"query_start descends", [](Args&, ServingCalls& p) { p.query_start[1] = 5; }},
      {"query_start ends at row 5", [](Args&, ServingCalls& p) { p.query_start[2] = 5; }},
      {"kv_len is [0]; [batch] of 1 to 2^31 - 1 sequences is wanted",
       [](Args& a, ServingCalls&) { a.attention.kv_len.shape[0] = 0; }},
      {"at most 30 were promised", [](Args& a, ServingCalls&) { a.attention.max_kv_len = 30; }},
      {"window -1 is negative", [](Args& a, ServingCalls&) { a.attention.mask.window = -1; }},
      {"right -2 is below -1", [](Args& a, ServingCalls&) { a.attention.mask.right = -2; }},
      {"softcap -1 is negative", [](Args& a, ServingCalls&) { a.attention.score.softcap = -1; }},
      {"softcap is nan; it is a finite number",
       [](Args& a, ServingCalls&) { a.attention.score.softcap = NAN; }},
      {"alibi of number 7",
       [](Args& a, ServingCalls&) { a.attention.score.alibi = static_cast<Alibi>(7); }},
      {"softcap is inf", [](Args& a, ServingCalls&) { a.attention.score.softcap = INFINITY; }},
      {"scale is nan; it is a finite number",
       [](Args& a, ServingCalls&) { a.attention.score.scale = NAN; }},
      {"scale is inf", [](Args& a, ServingCalls&) { a.attention.score.scale = INFINITY; }},
      {"scale is 3e+38; times log2(e) it is inf",
       [](Args& a, ServingCalls&) { a.attention.score.scale = 3e38f; }},
      {"softcap is 1e-40; 1 / softcap and softcap log2(e) are inf",
       [](Args& a, ServingCalls&) { a.attention.score.softcap = 1e-40f; }},
      {"q_scale[0] 1e+30 and k_scale[0] 1e+30 make inf of the scores' scale",
       [](Args& a, ServingCalls& p) {
         a.attention.q_scale = a.attention.k_scale = Tensor(p.one.data(), {1}), p.one[0] = 1e30f;
       }},
      {"slopes[1] is inf; an ALiBi slope is a finite number",
       [](Args& a, ServingCalls& p) {
         a.attention.slopes = Tensor(p.sinks.data(), {kHeads}), p.sinks[1] = INFINITY;
       }},
      {"window 9223372036854775807 is beyond",
       [](Args& a, ServingCalls&) { a.attention.mask.window = INT64_MAX; }},
      {"right 9223372036854775807 is beyond",
       [](Args& a, ServingCalls&) { a.attention.mask.right = INT64_MAX; }},
      {"k_scale[1] is nan",
       [](Args& a, ServingCalls& p) {
         a.attention.k_scale = Tensor(p.kv_scales.data(), {kKvHeads}), p.kv_scales[1] = NAN;
       }},
      {"out_scale[0] is 0",
       [](Args& a, ServingCalls& p) {
         a.attention.out_scale = Tensor(p.one.data(), {1}), p.one[0] = 0;
       }},
      {"1099511627776 pages; 0 to 2^31 - 1 are possible",
       [](Args& a, ServingCalls&) {  // many times the same page, which takes no memory
         for (Tensor* t : {&a.attention.k_cache, &a.attention.v_cache})
           t->shape[0] = std::int64_t{1} << 40, t->stride[0] = 0;
       }},
      {"max_query_len 4294967296",
       [](Args& a, ServingCalls&) { a.attention.max_query_len = std::int64_t{1} << 32; }},
      {"block_table [2, -1] has a negative extent",
       [](Args& a, ServingCalls&) { a.attention.block_table.shape[1] = -1; }},
      {"block_table [2, 4] has stride -4 in dimension 0",
       [](Args& a, ServingCalls&) { a.attention.block_table.stride[0] = -4; }},
      {"out [4, 4, 32] with strides [0, 32, 1] is written, and its elements overlap",
       [](Args& a, ServingCalls&) { a.attention.out.stride[0] = 0; }},
      {"lse [4, 4] with strides [4, 0] is written",
       [](Args& a, ServingCalls&) { a.attention.lse.tensor.stride[1] = 0; }},
      {"out overlaps q", [](Args& a, ServingCalls&) { a.attention.out = a.attention.q; }},
      {"out overlaps k_cache",
       [](Args& a, ServingCalls& p) { a.attention.out = p.rows(p.k_cache, kHeads); }},
      {"lse overlaps v_cache",
       [](Args& a, ServingCalls& p) { a.attention.lse.tensor.data = p.v_cache.data(); }},
      {"lse overlaps out",
       [](Args& a, ServingCalls& p) { a.attention.lse.tensor.data = p.out.data(); }},
      {"bf16_products is a way to make bf16 products",
       [](Args& a, ServingCalls&) { a.attention.dtypes.bf16_products = true; }},
      {"tf32 is a way to make fp32 products",
       [](Args& a, ServingCalls&) {
         a.attention.dtypes.tf32 = true;
         a.attention.q.dtype = bf16;
         a.attention.k_cache.dtype = a.attention.v_cache.dtype = bf16;
       }},
      {"qq_bias is [0, 0]; a matrix [width, width] of at least 1",
       [](Args& a, ServingCalls& p) {
         a.attention.qq_bias = Tensor(p.qq.data(), {0, 0});
       }},
      {"a row stride of 0",
       [](Args& a, ServingCalls& p) {
         a.attention.qq_bias = Tensor(p.qq.data(), {3, 3}), a.attention.qq_bias.stride[0] = 0;
       }},
      {"sequence 1 has 3 query rows; qq_bias is wide enough for 2",
       [](Args& a, ServingCalls& p) {
         a.attention.qq_bias = Tensor(p.qq.data(), {2, 2});
       }},
      {"qq_bias is uint8; fp32, fp16, bf16 or fp8 is wanted",
       [](Args& a, ServingCalls& p) {
         a.attention.qq_bias = Tensor(p.qq.data(), DType::uint8, {3, 3});
       }},
      {"qq_bias is [3, 3]; a query of 4 tokens needs [4, 4]",
       [](Args& a, ServingCalls& p) {
         a.attention.query_start = {}, a.attention.kv_len.shape[0] = 1;
         a.attention.qq_bias = Tensor(p.qq.data(), {3, 3});
       }},
      {"query_start is [2]; [3] is wanted",
       [](Args& a, ServingCalls&) { a.attention.query_start.shape[0] = 2; }},
      {"query_start is int64; int32 is wanted",
       [](Args& a, ServingCalls&) { a.attention.query_start.dtype = DType::int64; }},
      {"kv_len is uint8; int32 is wanted",
       [](Args& a, ServingCalls&) { a.attention.kv_len.dtype = DType::uint8; }},
      {"kv_len is on the cuda",
       [](Args& a, ServingCalls&) { a.attention.kv_len.device = Device::cuda; }},
      {"kv_len has stride 0; it must be dense",
       [](Args& a, ServingCalls&) { a.attention.kv_len.stride[0] = 0; }},
      {"kv_len is [2, 1]; [batch] of 1 to",
       [](Args& a, ServingCalls& p) {
         a.attention.kv_len = Tensor(p.kv_len.data(), {kBatch, 1});
       }},
      {"block_table is fp32; int32 is wanted",
       [](Args& a, ServingCalls&) { a.attention.block_table.dtype = fp32; }},
      {"block_table is [1, 4]; [2, columns]",
       [](Args& a, ServingCalls&) { a.attention.block_table.shape[0] = 1; }},
      {"block_table is on the cuda",
       [](Args& a, ServingCalls&) { a.attention.block_table.device = Device::cuda; }},
      {"causal is [3]; [2] is wanted",
       [](Args& a, ServingCalls& p) {
         a.attention.causal = Tensor(reinterpret_cast<std::uint8_t*>(p.qq.data()), {3});
       }},
      {"causal is int32; uint8 is wanted",
       [](Args& a, ServingCalls& p) { a.attention.causal = Tensor(p.kv_len.data(), {kBatch}); }},
      {"sinks is [3]; [4] is wanted",
       [](Args& a, ServingCalls& p) { a.attention.sinks = Tensor(p.sinks.data(), {3}); }},
      {"sinks is int32; fp32, fp16, bf16 or fp8 is wanted",
       [](Args& a, ServingCalls& p) {
         a.attention.sinks = Tensor(p.sinks.data(), DType::int32, {4});
       }},
      {"slopes is [1]; [4] is wanted",
       [](Args& a, ServingCalls& p) { a.attention.slopes = Tensor(p.sinks.data(), {1}); }},
      {"slopes is on the cuda",
       [](Args& a, ServingCalls& p) {
         a.attention.slopes = Tensor(p.sinks.data(), {kHeads}, Device::cuda);
       }},
      {"q_scale is [3]; [2] is wanted",
       [](Args& a, ServingCalls& p) { a.attention.q_scale = Tensor(p.kv_scales.data(), {3}); }},
      {"k_scale is bf16; fp32 is wanted",
       [](Args& a, ServingCalls& p) { a.attention.k_scale = Tensor(p.one.data(), bf16, {1}); }},
      {"v_scale has stride 2; it must be dense",
       [](Args& a, ServingCalls& p) {
         a.attention.v_scale = Tensor(p.kv_scales.data(), {kKvHeads});
         a.attention.v_scale.stride[0] = 2;
       }},
      {"out_scale is [2]; [1] is wanted",
       [](Args& a, ServingCalls& p) { a.attention.out_scale = Tensor(p.kv_scales.data(), {2}); }},
      {"out_scale is on the cuda",
       [](Args& a, ServingCalls& p) {
         a.attention.out_scale = Tensor(p.one.data(), {1}, Device::cuda);
       }},
      {"dtypes says that q is bf16; it is fp32",
       [](Args& a, ServingCalls&) { a.attention.dtypes.query = bf16; }},
      {"dtypes says that k_cache is e4m3; it is fp32",
       [](Args& a, ServingCalls&) { a.attention.dtypes.kv = e4m3; }},
      {"dtypes says that out is e5m2; it is fp32",
       [](Args& a, ServingCalls&) { a.attention.dtypes.out = e5m2; }},
      {"out is [4, 4, 31]", [](Args& a, ServingCalls&) { a.attention.out.shape[2] = 31; }},
      {"out is bf16; fp32, or fp8", [](Args& a, ServingCalls&) { a.attention.out.dtype = bf16; }},
      {"out is e4m3 and there is no out_scale",
       [](Args& a, ServingCalls&) { a.attention.out.dtype = e4m3; }},
      {"lse is [4, 3]", [](Args& a, ServingCalls&) { a.attention.lse.tensor.shape[1] = 3; }},
      {"lse is fp16", [](Args& a, ServingCalls&) { a.attention.lse.tensor.dtype = fp16; }},
      {"workspace has 0 bytes", [](Args& a, ServingCalls&) { a.attention.workspace = {}; }},
      {"this call needs", [](Args& a, ServingCalls&) { a.attention.workspace.bytes -= 1; }},
      {"aligned to 256 bytes",
       [](Args& a, ServingCalls&) {
         a.attention.workspace.data = static_cast<std::byte*>(a.attention.workspace.data) + 64;
       }},
  };
}

template <class Args>
std::vector<Change<Args>> operator+(std::vector<Change<Args>> a, std::vector<Change<Args>> b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(KernelsRefusals, SegmentedAttentionRefusesByName) {
  using A = SegmentedAttention;
  const auto call = [](const ServingOps& k, const A& a) { k.segmented_attention(a); };
  refuse_all<InputError, A>(
      paged_refusals<A>() +
          std::vector<Change<A>>{
              {"out is missing", [](A& a, ServingCalls&) { a.attention.out = {}; }}},
      [](ServingCalls& p) { return p.segmented(); }, call);
  refuse_all<Unsupported, A>(
      {{"head_dim 577",
        [](A& a, ServingCalls&) { a.attention.q.shape[2] = a.attention.k_cache.shape[3] = 577; }},
       {"fp8_products is not supported by calls over a paged cache",
        [](A& a, ServingCalls&) { a.attention.dtypes.fp8_products = true; }}},
      [](ServingCalls& p) { return p.segmented(); }, call);
  refuse_all<InputError, A>(
      {
          {"segments.output is [4, 4, 3, 31]; [4, 4, segments, at least 32]",
           [](A& a, ServingCalls&) { a.segments.output.shape[3] = 31; }},
          {"its rows lie one behind the other",
           [](A& a, ServingCalls&) { a.segments.output.stride[1] += 8; }},
          {"segments.max is [4, 4, 2]; [4, 4, 3]",
           [](A& a, ServingCalls&) { a.segments.max.shape[2] = 2; }},
          {"segments.expsum [] has no data", [](A& a, ServingCalls&) { a.segments.expsum = {}; }},
          {"segments.max is fp16", [](A& a, ServingCalls&) { a.segments.max.dtype = fp16; }},
          {"a tile has 0 keys", [](A& a, ServingCalls&) { a.segments.tile = 0; }},
          {"segments have -1 keys", [](A& a, ServingCalls&) { a.segments.keys = -1; }},
          {"skip_decode is given with segments", [](A& a, ServingCalls&) { a.skip_decode = true; }},
          {"sequence 1 has 33 keys and its segments hold 30",
           [](A& a, ServingCalls&) { a.segments.keys = 10; }},
          {"lse and out_scale go with out", [](A& a, ServingCalls&) { a.attention.out = {}; }},
          {"lse and out_scale go with out",
           [](A& a, ServingCalls& p) {
             a.attention.out = {}, a.attention.lse = {};
             a.attention.out_scale = Tensor(p.one.data(), {1});
           }},
      },
      [](ServingCalls& p) { return p.handed_out(); }, call);
}

TEST(KernelsRefusals, ContextAttentionRefusesByName) {
  using A = ContextAttention;
  const auto fit = [](ServingCalls& p) { return p.context(); };
  const auto call = [](const ServingOps& k, const A& a) { k.context_attention(a); };
  std::vector<Change<A>> changes = paged_refusals<A>();
  std::erase_if(changes, [](const Change<A>& change) {  // the new tokens need no room in the cache
    return std::string(change.text).find("[1][2]") != std::string::npos;
  });
  refuse_all<InputError, A>(
      changes +
          std::vector<Change<A>>{
              {"out is missing",
               [](A& a, ServingCalls&) { a.attention.out = {}, a.attention.lse = {}; }},
              {"k is [4, 4, 32]; [4, 2, 32]",
               [](A& a, ServingCalls& p) { a.k = p.rows(p.q, kHeads); }},
              {"v is bf16; fp32 is wanted", [](A& a, ServingCalls&) { a.v.dtype = bf16; }},
              {"k is given without v", [](A& a, ServingCalls&) { a.v = {}; }},
              {"v is given without k", [](A& a, ServingCalls&) { a.k = {}; }},
              {"mask.alignment is upper_left",
               [](A& a, ServingCalls&) { a.attention.mask.alignment = Alignment::upper_left; }},
              {"give one of them",
               [](A& a, ServingCalls& p) {
                 a.attention.out_scale = a.out_scale_inv = Tensor(p.one.data(), {1});
               }},
              {"out_scale_inv is [2]; [1] is wanted",
               [](A& a, ServingCalls& p) { a.out_scale_inv = Tensor(p.kv_scales.data(), {2}); }},
              {"out_scale_inv[0] is nan; a scale is a finite number",
               [](A& a, ServingCalls& p) {
                 a.out_scale_inv = Tensor(p.one.data(), {1}), p.one[0] = NAN;
               }},
              {"block_table[1][1] is 77", [](A&, ServingCalls& p) { p.table[5] = 77; }},
              {"has 3 new tokens and kv_len 2, which must count them",
               [](A&, ServingCalls& p) { p.kv_len[1] = 2; }},
          },
      fit, call);
  refuse_all<Unsupported, A>(
      {{"fp8_products is not supported by calls over a paged cache",
        [](A& a, ServingCalls&) { a.attention.dtypes.fp8_products = true; }}},
      fit, call);
}

TEST(KernelsRefusals, ReduceSegmentsRefusesByName) {
  using A = ReduceSegments;
  refuse_all<InputError, A>(
      {
          {"out is e5m2 and there is no out_scale",
           [](A& a, ServingCalls&) { a.out.dtype = e5m2; }},
          {"out is int32; fp32, fp16, bf16 or fp8 is wanted",
           [](A& a, ServingCalls&) { a.out.dtype = DType::int32; }},
          {"kv_len is missing", [](A& a, ServingCalls&) { a.kv_len = {}; }},
          {"kv_len is [0]; [batch] of 1 to", [](A& a, ServingCalls&) { a.kv_len.shape[0] = 0; }},
          {"kv_len is int64; int32", [](A& a, ServingCalls&) { a.kv_len.dtype = DType::int64; }},
          {"kv_len is on the cuda", [](A& a, ServingCalls&) { a.kv_len.device = Device::cuda; }},
          {"a batch of 2 sequences needs query_start",
           [](A& a, ServingCalls&) { a.query_start = {}; }},
          {"query_start is [3]; [2]", [](A& a, ServingCalls&) { a.kv_len.shape[0] = 1; }},
          {"query_start has stride 2", [](A& a, ServingCalls&) { a.query_start.stride[0] = 2; }},
          {"out_scale is [2]; [1] is wanted",
           [](A& a, ServingCalls& p) { a.out_scale = Tensor(p.kv_scales.data(), {2}); }},
          {"out_scale[0] is 0; a scale is a finite number, and not 0",
           [](A& a, ServingCalls& p) { a.out_scale = Tensor(p.one.data(), {1}), p.one[0] = 0; }},
          {"segments.output is [4, 4, 3, 40]; [4, 4, segments, at least 48]",
           [](A& a, ServingCalls&) { a.out.shape[2] = 48; }},
          {"segments.max [4, 4, 3] has strides",
           [](A& a, ServingCalls&) { a.segments.max.stride[1] = 4; }},
          {"kv_len[1] is -5", [](A&, ServingCalls& p) { p.kv_len[1] = -5; }},
          {"lse is [5, 4]", [](A& a, ServingCalls&) { a.lse.tensor.shape[0] = 5; }},
          {"sequence 1 has 33 keys and its segments hold 30",
           [](A& a, ServingCalls&) { a.segments.keys = 10; }},
          {"out is [4, 0, 32]: dimension 1 has 0 elements",
           [](A& a, ServingCalls&) { a.out.shape[1] = 0; }},
          {"lse overlaps out", [](A& a, ServingCalls&) { a.lse.tensor.data = a.out.data; }},
      },
      [](ServingCalls& p) { return p.reduce(); },
      [](const ServingOps& k, const A& a) { k.reduce_segments(a); });
}

TEST(KernelsRefusals, AppendRefusesByNameAndWritesNothing) {
  using A = AppendKv;
  ServingCalls before;
  const std::vector<Change<A>> changes{
      {"slots[2] is 144, past the end", [](A&, ServingCalls& p) { p.slots[2] = kPages * kPage; }},
      {"token 2 goes to slot 3, which another token has too",
       [](A&, ServingCalls& p) { p.slots[2] = 3; }},
      {"slots is missing", [](A& a, ServingCalls&) { a.slots = {}; }},
      {"slots is [3]; [4] is wanted", [](A& a, ServingCalls&) { a.slots.shape[0] = 3; }},
      {"slots is int32; int64 is wanted",
       [](A& a, ServingCalls&) { a.slots.dtype = DType::int32; }},
      {"slots is on the cuda", [](A& a, ServingCalls&) { a.slots.device = Device::cuda; }},
      {"slots has stride 0; it must be dense", [](A& a, ServingCalls&) { a.slots.stride[0] = 0; }},
      {"k_scale is [3]; [2] is wanted",
       [](A& a, ServingCalls& p) { a.k_scale = Tensor(p.kv_scales.data(), {3}); }},
      {"v_scale is fp16; fp32 is wanted",
       [](A& a, ServingCalls& p) { a.v_scale = Tensor(p.one.data(), fp16, {1}); }},
      {"k is [4, 2]; [tokens, kv_heads, head_dim]", [](A& a, ServingCalls&) { a.k.dims = 2; }},
      {"v is [3, 2, 32]; [4, 2, 32]", [](A& a, ServingCalls&) { a.v.shape[0] = 3; }},
      {"k is e4m3; fp32, fp16 or bf16", [](A& a, ServingCalls&) { a.k.dtype = e4m3; }},
      {"k_cache is bf16; fp32, or fp8", [](A& a, ServingCalls&) { a.k_cache.dtype = bf16; }},
      {"k_cache is e4m3 and there is no k_scale",
       [](A& a, ServingCalls&) { a.k_cache.dtype = a.v_cache.dtype = e4m3; }},
      {"pages are", [](A& a, ServingCalls&) { a.k_cache.shape[3] = 16; }},
      {"k is [4, 2, 0]: dimension 2 has 0", [](A& a, ServingCalls&) { a.k.shape[2] = 0; }},
      {"slots[0] is 115, past the end",
       [](A& a, ServingCalls&) { a.k_cache.shape[0] = a.v_cache.shape[0] = 0; }},
      {"k_cache [9, 16, 2, 32] with strides [1024, 0, 32, 1] is written",
       [](A& a, ServingCalls&) { a.k_cache.stride[1] = 0; }},
      {"v is given, but v_cache is the first columns of k_cache: leave it out",
       [](A& a, ServingCalls&) { a.v_cache = a.k_cache; }},
      {"v_cache overlaps k_cache",
       [](A& a, ServingCalls& p) { a.v_cache.data = p.k_cache.data() + kKvHeads * kDim; }},
      {"v [] has no data", [](A& a, ServingCalls&) { a.v = {}; }},
      {"k_cache overlaps k", [](A& a, ServingCalls& p) { a.k = p.rows(p.k_cache, kKvHeads); }},
      {"v_scale[0] is 0; a scale is a finite number, and not 0",
       [](A& a, ServingCalls& p) { a.v_scale = Tensor(p.one.data(), {1}), p.one[0] = 0; }},
  };
  for (const Change<A>& change : changes) {
    ServingCalls p;
    A a = p.append();
    change.apply(a, p);
    expect_refused<InputError>(
        p, [&] { p.kernels.append_kv(a); }, change.text);
    EXPECT_EQ(p.k_cache, before.k_cache);
    EXPECT_EQ(p.v_cache, before.v_cache);
  }
}

TEST(KernelsRefusals, MergeRefusesByName) {
  using A = MergeAttnStates;
  std::vector<float> a_lse(kTokens * kHeads), b_lse = a_lse;
  const auto lse = [](std::vector<float>& data) {
    return Lse::heads_tokens(Tensor(data.data(), fp32, {kHeads, kTokens}));
  };
  const auto fit = [&](ServingCalls& p) {
    return A{.out = p.rows(p.out, kHeads),
             .out_lse = lse(p.lse),
             .prefix_out = p.rows(p.q, kHeads),
             .prefix_lse = lse(a_lse),
             .suffix_out = p.rows(p.k_cache, kHeads),
             .suffix_lse = lse(b_lse)};
  };
  refuse_all<InputError, A>(
      {
          {"prefix_out is [4, 4]", [](A& a, ServingCalls&) { a.prefix_out.dims = 2; }},
          {"prefix_out is e4m3 and there is no prefix_scale",
           [](A& a, ServingCalls&) { a.prefix_out.dtype = e4m3; }},
          {"suffix_out is e5m2 and there is no suffix_scale",
           [](A& a, ServingCalls&) { a.suffix_out.dtype = e5m2; }},
          {"suffix_out is no type; fp32, fp16, bf16 or fp8 is wanted",
           [](A& a, ServingCalls&) { a.suffix_out.dtype = static_cast<DType>(99); }},
          {"prefix_out is int32; fp32, fp16, bf16 or fp8 is wanted",
           [](A& a, ServingCalls&) { a.prefix_out.dtype = DType::int32; }},
          {"prefix_scale is [2]; [1] is wanted",
           [](A& a, ServingCalls& p) { a.prefix_scale = Tensor(p.kv_scales.data(), {2}); }},
          {"suffix_scale is bf16; fp32 is wanted",
           [](A& a, ServingCalls& p) { a.suffix_scale = Tensor(p.one.data(), bf16, {1}); }},
          {"out_scale is on the cuda",
           [](A& a, ServingCalls& p) { a.out_scale = Tensor(p.one.data(), {1}, Device::cuda); }},
          {"prefix_scale[0] is nan; a scale is a finite number",
           [](A& a, ServingCalls& p) {
             a.prefix_scale = Tensor(p.one.data(), {1}), p.one[0] = NAN;
           }},
          {"out_scale[0] is 0; a scale is a finite number, and not 0",
           [](A& a, ServingCalls& p) { a.out_scale = Tensor(p.one.data(), {1}), p.one[0] = 0; }},
          {"is written, and its elements overlap: stride 0 of dimension 0",
           [](A& a, ServingCalls&) { a.out.stride[0] = 0; }},
          {"has stride -128 in dimension 0; strides are not negative",
           [](A& a, ServingCalls&) { a.suffix_out.stride[0] = -128; }},
          {"prefix_out is [4, 0, 32]: dimension 1 has 0 elements",
           [](A& a, ServingCalls&) { a.prefix_out.shape[1] = 0; }},
          {"prefix_out is [4, 4, 0]: dimension 2 has 0 elements",
           [](A& a, ServingCalls&) { a.prefix_out.shape[2] = 0; }},
          {"is not aligned to its elements",
           [](A& a, ServingCalls&) {
             a.prefix_out.data = static_cast<std::byte*>(a.prefix_out.data) + 2;
           }},
          {"suffix_out is [3, 4, 32]", [](A& a, ServingCalls&) { a.suffix_out.shape[0] = 3; }},
          {"out is [4, 4, 16]", [](A& a, ServingCalls&) { a.out.shape[2] = 16; }},
          {"out is e4m3 and there is no out_scale",
           [](A& a, ServingCalls&) { a.out.dtype = e4m3; }},
          {"out has stride 2", [](A& a, ServingCalls&) { a.out.stride[2] = 2; }},
          {"prefix_lse is fp16", [](A& a, ServingCalls&) { a.prefix_lse.tensor.dtype = fp16; }},
          {"suffix_lse [] has no data", [](A& a, ServingCalls&) { a.suffix_lse = {}; }},
          {"out_lse is [4, 3]", [](A& a, ServingCalls&) { a.out_lse.tensor.shape[1] = 3; }},
          {"prefill_tokens_with_context is -1",
           [](A& a, ServingCalls&) { a.prefill_tokens_with_context = -1; }},
          {"out overlaps suffix_out: it may be the same tensor",
           [](A& a, ServingCalls& p) {
             a.out = a.suffix_out, a.suffix_out.data = p.k_cache.data() + 1;
           }},
          {"out overlaps prefix_out: it may be the same tensor",
           [](A& a, ServingCalls& p) { a.out = a.prefix_out, a.prefix_out.data = p.q.data() + 1; }},
          {"out overlaps prefix_out: it may be the same tensor",
           [](A& a, ServingCalls& p) {
             a.out = a.prefix_out, a.out.dtype = e4m3;
             a.out_scale = Tensor(p.one.data(), {1});
           }},
          {"out_lse overlaps suffix_lse: it may be the same tensor",
           [](A& a, ServingCalls&) {
             a.out_lse = a.suffix_lse;
             std::swap(a.out_lse.tensor.stride[0], a.out_lse.tensor.stride[1]);
           }},
      },
      fit, [](const ServingOps& k, const A& a) { k.merge_attn_states(a, LogBase::e); });
}

TEST(KernelsRefusals, MergeStatesRefusesByName) {
  using A = MergeStates;
  std::vector<float> parts_lse(3 * kTokens * kHeads);
  refuse_all<InputError, A>(
      {
          {"parts is [3, 4, 4]; [parts, tokens, heads, dim]",
           [](A& a, ServingCalls&) { a.parts.dims = 3; }},
          {"of at least one part", [](A& a, ServingCalls&) { a.parts.shape[0] = 0; }},
          {"lses is [2, 4, 4]", [](A& a, ServingCalls&) { a.lses.tensor.shape[0] = 2; }},
          {"out is [5, 4, 32]", [](A& a, ServingCalls&) { a.out.shape[0] = 5; }},
          {"out is e5m2 and there is no out_scale",
           [](A& a, ServingCalls&) { a.out.dtype = e5m2; }},
          {"parts is e4m3 and there is no part_scales",
           [](A& a, ServingCalls&) { a.parts.dtype = e4m3; }},
          {"part_scales[0] is inf",
           [](A& a, ServingCalls& p) {
             a.part_scales = Tensor(p.kv_scales.data(), {3}), p.kv_scales[0] = INFINITY;
           }},
          {"part_scales[2] is inf",
           [](A& a, ServingCalls& p) {
             a.part_scales = Tensor(p.kv_scales.data(), {3}), p.kv_scales[2] = INFINITY;
           }},
          {"part_scales is [2]; [3] is wanted",
           [](A& a, ServingCalls& p) { a.part_scales = Tensor(p.kv_scales.data(), {2}); }},
          {"part_scales is fp16; fp32 is wanted",
           [](A& a, ServingCalls& p) { a.part_scales = Tensor(p.kv_scales.data(), fp16, {3}); }},
          {"part_scales has stride 0; it must be dense",
           [](A& a, ServingCalls& p) {
             a.part_scales = Tensor(p.kv_scales.data(), {3}), a.part_scales.stride[0] = 0;
           }},
          {"out_scale is [3]; [1] is wanted",
           [](A& a, ServingCalls& p) { a.out_scale = Tensor(p.kv_scales.data(), {3}); }},
          {"out overlaps parts", [](A& a, ServingCalls& p) { a.out = p.rows(p.k_cache, kHeads); }},
      },
      [&](ServingCalls& p) {
        return A{.out = p.rows(p.out, kHeads),
                 .parts = Tensor(p.k_cache.data(), fp32, {3, kTokens, kHeads, kDim}),
                 .lses = Lse::tokens_heads(Tensor(parts_lse.data(), fp32, {3, kTokens, kHeads}))};
      },
      [](const ServingOps& k, const A& a) { k.merge_states(a, LogBase::two); });
}

}  // namespace
}  // namespace longspan
