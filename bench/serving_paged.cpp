// Decode and chunked prefill over a paged cache.
#include "bench/paged.hpp"
#include "bench/serving.hpp"

namespace longspan::bench {
namespace {

/// The rows of a table over every requested kind of cache.
template <class Row, std::size_t kRows, class Case>
void over_caches(const Settings& s, const char* section, const Row (&rows)[kRows],
                 const Case& one) {
  for (std::size_t r = 0; r < kRows; ++r)
    for (PageLayout layout : s.layouts)
      for (int page : s.pages)
        if (s.takes(r))
          attempt({{"section", section}, {"row", r}, {"page", page}, {"layout", name(layout)}},
                  [&] { one(rows[r], page, layout); });
}

constexpr DecodeRow kDecode[] = {{32, 8, 1, 131072}, {64, 8, 1, 131072}, {32, 8, 8, 32768},
                                 {64, 8, 8, 32768},  {32, 8, 32, 4096},  {8, 1, 16, 65536}};

void decode_row(const Settings& s, const ServingOps& ops, const DecodeRow& row, int page,
                PageLayout layout) {
  const std::int64_t kv_len = s.tiny ? row.kv_len / 512 + 3 : row.kv_len;
  const CacheShape shape{row.kv_heads, 128, s.cache_type(), page, layout, !s.identity};
  const Decode problem(s.device, ops, {row.heads, row.kv_heads, row.batch, s.tokens, kv_len}, shape,
                       s.window);
  const Times t = times(s.device, std::ref(problem), effort(s, 5));
  const std::int64_t read = s.window > 0 ? std::min(kv_len, s.window + s.tokens - 1) : kv_len;
  const double bytes = 2.0 * row.batch * static_cast<double>(read) * row.kv_heads *
                       static_cast<double>(storage_of(shape.dtype).row_bytes(128));
  Json line = problem.describe("decode");
  line["bytes"] = bytes;
  line["tb_s"] = rate(bytes, t);
  const Judge judge = problem.judge();
  print(line, t, &judge, bf16);
}

struct ChunkRow {
  std::int64_t q_len, context;
  int batch;
};
constexpr ChunkRow kChunk[] = {{512, 8192, 1},  {512, 32768, 1},  {512, 32768, 4},
                               {2048, 8192, 1}, {2048, 32768, 1}, {2048, 32768, 4}};

void chunk_row(const Settings& s, const ServingOps& ops, ChunkRow row, int page,
               PageLayout layout) {
  if (s.tiny) row = {row.q_len / 32 + 1, row.context / 128 + 5, row.batch};
  const CacheShape shape{8, 128, s.cache_type(), page, layout, !s.identity};
  const Chunk problem(s.device, ops, {32, 8, row.batch, row.q_len, row.q_len + row.context}, shape);
  const Times t = times(s.device, std::ref(problem), effort(s, 1));
  Json line = problem.describe("chunked");
  line["operations"] = problem.operations();
  line["tflop_s"] = rate(problem.operations(), t);
  const Judge judge = problem.judge();
  print(line, t, &judge, bf16);
}

}  // namespace

void decode(const Settings& s, const ServingOps& ops) {
  over_caches(s, "decode", kDecode, [&](const DecodeRow& row, int page, PageLayout layout) {
    decode_row(s, ops, row, page, layout);
  });
}

void chunked(const Settings& s, const ServingOps& ops) {
  over_caches(s, "chunked", kChunk, [&](const ChunkRow& row, int page, PageLayout layout) {
    chunk_row(s, ops, row, page, layout);
  });
}

}  // namespace longspan::bench
