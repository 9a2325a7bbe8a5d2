#include "src/strategy/shared/dealt_rows.hpp"

#include <algorithm>
#include <cmath>

#include "longspan/storage.hpp"
#include "src/strategy/shared/most_rows.hpp"

namespace longspan {

double most_result_rows(const Options& o, int ranks, const RunSize& size) {
  if (o.queries) return size.most_tokens;
  if (o.results.part == ResultPart::heads) return size.tokens;
  if (o.results.part == ResultPart::all) return std::ceil(size.tokens / ranks);
  const Sharding& rule = o.results.rows;
  if (is_by_table(rule)) return size.tokens;
  const auto rows = static_cast<std::int64_t>(std::min(size.tokens, 1e12));
  return static_cast<double>(rule.resolve(rows, 0, ranks).max_local_len(rows));
}

std::int64_t DealtRows::row_bytes() const {
  return layer_.bounds.heads * storage_of(layer_.bounds.q_dtype).row_bytes(layer_.bounds.head_dim);
}

std::int64_t DealtRows::most_capacity() const {
  if (are_gathered()) return layer_.options.limits.max_tokens;
  return most_rows_of_a_rank(rule(), layer_.options.limits.max_tokens,
                             layer_.options.limits.max_batch, layer_.comm.size());
}

bool DealtRows::are_counted(const Run& run) const {
  const Layout layout = run.arrays.queries.layout;
  if (layout == Layout::listed) return false;
  return layer_.kernels.device() == Device::host ||
         (run.arrays.query_start == nullptr && layout != Layout::ranges);
}

std::int64_t DealtRows::rows_of(const Run& run, int rank) const {
  const Shard& rows = run.arrays.queries;
  if (!are_counted(run))
    return std::min(most_rows_of_a_rank(rule(), rows.length, run.arrays.batch, layer_.comm.size()),
                    layer_.options.limits.max_tokens);
  const Shard own = rows.with_rank(rank);
  const std::int32_t* const start = run.arrays.query_start;
  std::int64_t count = start == nullptr ? own.local_len(rows.length) : 0;
  for (int b = 0; start != nullptr && b < run.arrays.batch; ++b)
    count += own.local_len(start[b + 1] - start[b]);
  return std::min(count, most_capacity());
}

std::int64_t DealtRows::rows_of_node(const Run& run) const {
  const Shard& rows = run.arrays.queries;
  if (!are_counted(run))
    return std::min(most_rows_of_a_rank(of_nodes(rule(), mapped_.count), rows.length,
                                        run.arrays.batch, mapped_.nodes),
                    layer_.options.limits.max_tokens * (are_gathered() ? mapped_.count : 1));
  std::int64_t count = 0;
  for (int p = 0; p < mapped_.count; ++p) count += rows_of(run, mapped_.first + p);
  return count;
}

std::int64_t DealtRows::capacity(const Run& run) const {
  if (!are_counted(run)) return rows_of(run, 0);
  std::int64_t most = 0;
  for (int p = 0; p < layer_.comm.size(); ++p) most = std::max(most, rows_of(run, p));
  return most;
}

void DealtRows::lay_out_map(Parts& memory) {
  if (!are_dealt()) return;
  map_ = memory.take_array<std::int64_t>(static_cast<std::size_t>(mapped_.count) *
                                         static_cast<std::size_t>(most_capacity()));
  if (mapped_.nodes > 1)
    part_start_ = memory.take_array<std::int32_t>(
        static_cast<std::size_t>(layer_.options.limits.max_batch) + 1);
}

void DealtRows::lay_out(Parts& memory) {
  if (are_gathered()) {
    gathered_ = memory.take(static_cast<std::size_t>(layer_.comm.size() * most_capacity()) *
                            static_cast<std::size_t>(row_bytes()));
    ordered_ = memory.take(static_cast<std::size_t>(most_tokens() * row_bytes()));
  }
  lay_out_map(memory);
}

void DealtRows::prepare(Pass& pass) const {
  if (!are_gathered()) return;
  const Run& run = pass.run;
  const kernels::AttendParams& bounds = layer_.bounds;
  pass.attend.tokens = run.args.total_tokens;
  pass.attend.batch.query_start = run.arrays.query_start;
  pass.attend.batch.whole_query_start = nullptr;
  pass.attend.queries = {};
  pass.attend.q = {ordered_, std::int64_t{bounds.heads} * bounds.head_dim, bounds.head_dim};
}

void DealtRows::make_map(const Pass& pass) const {
  if (!are_dealt()) return;
  const Run& run = pass.run;
  const Shard& rows = run.arrays.queries;
  const std::int64_t most = capacity(run);
  if (rows.layout == Layout::listed)
    return layer_.comm.all_gather(rows.table, map_,
                                  static_cast<std::size_t>(most) * sizeof(std::int64_t), run.stream,
                                  "gather of query positions", pass.digests);
  kernels::MapParams params{rows, pass.attend.batch, mapped_.count, most, map_, mapped_.first};
  params.part = part_of_node(rows, mapped_);
  if (mapped_.nodes > 1 && run.arrays.query_start != nullptr) {
    layer_.kernels.row_starts({params.part, run.arrays.query_start, run.arrays.batch, part_start_},
                              run.stream);
    params.part_start = part_start_;
  }
  layer_.kernels.map_rows(params, run.stream);
}

void DealtRows::gather(const Pass& pass) const {
  make_map(pass);
  if (!are_gathered()) return;
  const Run& run = pass.run;
  const Shard& rows = run.arrays.queries;
  const std::int64_t most = capacity(run), slot_bytes = most * row_bytes();
  std::byte* const mine = gathered_ + rows.rank * slot_bytes;
  layer_.kernels.place_rows({static_cast<const std::byte*>(run.args.q.data), mine, nullptr,
                             std::min(run.args.q.shape[0], most), row_bytes()},
                            run.stream);
  layer_.comm.all_gather(mine, gathered_, static_cast<std::size_t>(slot_bytes), run.stream,
                         "gather of queries", pass.digests);
  layer_.kernels.place_rows(
      {gathered_, ordered_, map_, rows.ranks * most, row_bytes(), pass.attend.tokens}, run.stream);
}

}  // namespace longspan
