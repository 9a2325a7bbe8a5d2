#include "python/src/lengths.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <string>
#include <utility>

#include "longspan/error.hpp"
#include "python/src/dtypes.hpp"

namespace longspan::python {
namespace {

/// A vector of lengths or starts that the host can read.
bool is_readable(const Tensor& t) {
  return t.device == Device::host && t.dims == 1 &&
         (t.dtype == DType::int32 || t.dtype == DType::int64);
}
std::int64_t entry(const Tensor& t, std::int64_t i) {
  return t.dtype == DType::int32 ? static_cast<const std::int32_t*>(t.data)[i * t.stride[0]]
                                 : static_cast<const std::int64_t*>(t.data)[i * t.stride[0]];
}

/// From entry i to the next, where a table ascends; capped far above any valid length.
std::int64_t step(const Tensor& t, std::int64_t i) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  const std::int64_t from = std::clamp<std::int64_t>(entry(t, i), 0, kMost);
  return std::clamp<std::int64_t>(entry(t, i + 1), from, kMost) - from;
}

/// Rows that a rank has by a rule, of all sequences: `rows` are those of a packed batch, or of each
/// sequence. No value where only a GPU can read the number, or only the rank itself knows it.
std::optional<std::int64_t> rows_of_rank(const AttendCall& call, const Sharding& rule,
                                         std::int64_t rows, int rank, int ranks) {
  const Tensor &starts = call.cu_seqlens_q.tensor(), &ends = call.query_table.tensor();
  if (rule.layout == Layout::listed) return std::nullopt;
  if (rule.layout == Layout::ranges) {
    if (!is_readable(ends) || ends.shape[0] != std::int64_t{ranks} + 1) return std::nullopt;
    return step(ends, rank);
  }
  if (!call.cu_seqlens_q) return rule.resolve(rows, rank, ranks).local_len(rows) * call.batch();
  if (!is_readable(starts)) return std::nullopt;
  std::int64_t held = 0;
  for (std::int64_t b = 0; b + 1 < starts.shape[0]; ++b) {
    const std::int64_t length = step(starts, b);
    held += rule.resolve(length, rank, ranks).local_len(length);
  }
  return held;
}

/// The most rows that a rank can have where only a GPU can read the lengths.
std::int64_t most_rows(const AttendCall& call, const Sharding& rule, std::int64_t rows, int ranks) {
  const std::int64_t beyond_even = rule.layout == Layout::contiguous    ? 2 * kSegment
                                   : rule.layout == Layout::interleaved ? rule.block
                                                                        : 2;
  const std::int64_t sequences = std::max<std::int64_t>(0, call.cu_seqlens_q.tensor().shape[0] - 1);
  return std::min(rows, rows / ranks + sequences * beyond_even);
}

std::string text_of(const Sharding& rule) {
  std::string made = name(rule.layout);
  if (rule.layout == Layout::interleaved) made += ":" + std::to_string(rule.block);
  return made;
}

/// A rank's report where lengths are asked for.
struct PartReport {
  std::array<std::int64_t, 4> numbers;  // own keys, own rows, whole_keys, whole_queries
  std::string keys, queries, contradiction;

  std::string text() const {
    std::string made;
    for (const std::int64_t number : numbers) made += std::to_string(number) + "\n";
    return made + keys + "\n" + queries + "\n" + contradiction;
  }
  static PartReport of(const std::string& text) {
    PartReport report;
    std::size_t at = 0;
    const auto line = [&] {
      const std::size_t end = std::min(text.find('\n', at), text.size());
      const std::string made = text.substr(at, end - at);
      at = std::min(end + 1, text.size());
      return made;
    };
    for (std::int64_t& number : report.numbers) {
      const std::string digits = line();
      std::from_chars(digits.data(), digits.data() + digits.size(), number);
    }
    report.keys = line();
    report.queries = line();
    report.contradiction = text.substr(at);
    return report;
  }
};

/// Throws the error in the ranks' reports, the same on every rank.
void check_reports(const std::vector<PartReport>& all, int own) {
  for (std::size_t r = 0; r < all.size(); ++r)
    if (!all[r].contradiction.empty())
      throw InputError((static_cast<int>(r) == own ? "" : "on rank " + std::to_string(r) + ": ") +
                       all[r].contradiction);
  for (std::size_t r = 1; r < all.size(); ++r)
    for (const auto& [name, field] :
         {std::pair{"keys", &PartReport::keys}, {"queries", &PartReport::queries}})
      if (all[r].*field != all[0].*field)
        throw UsageError(std::string("'") + name + "' differs between ranks: rank 0 has " +
                         all[0].*field + ", rank " + std::to_string(r) + " has " + all[r].*field +
                         ". Give every rank the same");
}

/// One of the two arrays that are dealt out.
struct Part {
  const char* array;  // "k"
  const char* what;   // "keys"
  const char* argument;
  const char* table;
  std::size_t own, whole;  // in Said::numbers
};
constexpr Part kKeys{"k", "keys", "keys", "key_table", 0, 2};
constexpr Part kRows{"q", "rows", "queries", "query_table", 1, 3};

/// The advice for parts in rank order by another cut than the contiguous rule's.
std::string other_ends(const Part& part, const std::string& ends) {
  return std::string(". The contiguous layout cuts at multiples of ") + std::to_string(kSegment) +
         ": longspan.shard does, or give " + part.argument + "='ranges' and " + part.table + "=" +
         ends;
}

/// Compares the ranks' parts with the rule; for parts in rank order by another cut, returns where
/// each begins.
std::vector<std::int64_t> ends_of(const std::vector<PartReport>& all, const Part& part,
                                  const Sharding& rule, std::int64_t total, bool any_parts) {
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::int64_t whole = all[r].numbers[part.whole];
    if (whole >= 0 && whole != total)
      throw InputError(std::string(part.array) + " of rank " + std::to_string(r) +
                       " was cut by longspan.shard from " + std::to_string(whole) + " " +
                       part.what + ", and all ranks together have " + std::to_string(total) +
                       ": every rank gives its part of the same array");
  }
  if (rule.layout == Layout::ranges || rule.layout == Layout::listed) return {};
  const int ranks = static_cast<int>(all.size());
  std::vector<std::int64_t> ends{0};
  int wrong = -1;
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t found = all[static_cast<std::size_t>(r)].numbers[part.own];
    ends.push_back(ends.back() + found);
    if (wrong < 0 && found != rule.resolve(total, r, ranks).local_len(total)) wrong = r;
  }
  if (wrong < 0) return {};
  const bool in_order = rule.layout == Layout::contiguous;
  if (in_order && any_parts) return ends;
  std::string text = "[";
  for (const std::int64_t end : ends) text += (text.size() > 1 ? ", " : "") + std::to_string(end);
  throw InputError(
      std::string(part.array) + " has " +
      std::to_string(all[static_cast<std::size_t>(wrong)].numbers[part.own]) + " " + part.what +
      " on rank " + std::to_string(wrong) + ", of " + std::to_string(total) +
      " on all ranks; the layout '" + text_of(rule) + "' (" + part.argument + ") gives that rank " +
      std::to_string(rule.resolve(total, wrong, ranks).local_len(total)) +
      (in_order ? other_ends(part, text + "]")
                : std::string(": longspan.shard(") + part.array + ", ...) cuts it so"));
}

/// Compares this rank's keys with the rule where the caller gives their number: refuses parts that
/// cannot follow the rule. Spare rows behind a rank's own keys are allowed.
void check_own_part(const AttendCall& call, const Sharding& rule, const Communicator& world) {
  if (world.size() == 1 || call.total_keys < 0 || call.cache_seqlens || call.k_new ||
      call.k.tensor().dims != 3 || rule.layout == Layout::ranges || rule.layout == Layout::listed)
    return;
  const std::int64_t total = call.total_keys, found = call.k.tensor().shape[0],
                     share = rule.resolve(total, world.rank(), world.size()).local_len(total);
  const bool in_order = rule.layout == Layout::contiguous;
  if (found == share || !(in_order || found == total)) return;
  throw InputError("k has " + std::to_string(found) + " keys on rank " +
                   std::to_string(world.rank()) + ", and total_keys is " + std::to_string(total) +
                   "; the layout '" + text_of(rule) + "' (keys) gives that rank " +
                   std::to_string(share) +
                   (in_order ? other_ends(kKeys, "where each rank's begin") +
                                   ", or leave total_keys out, so that ranks are asked"
                             : ": every rank gives its own keys, as longspan.shard(k, ...) cuts "
                               "them"));
}

}  // namespace

std::int64_t own_rows(const AttendCall& call, const Sharding& rule, const Communicator& world) {
  if ((rule.layout == Layout::listed || rule.layout == Layout::ranges) && !call.query_table)
    throw InputError(std::string("query_table is None, and results are ") + name(rule.layout) +
                     ": the rows that this rank gets");
  if (rule.layout == Layout::listed && is_readable(call.query_table.tensor())) {
    const Tensor& table = call.query_table.tensor();
    std::int64_t count = 0;
    while (count < table.shape[0] && entry(table, count) >= 0) ++count;
    return count;
  }
  const auto rows = rows_of_rank(call, rule, call.tokens(), world.rank(), world.size());
  if (!rows)
    throw InputError(
        "out is missing: with results by rows, of sequences or by a table that lie on a GPU, how "
        "many rows this rank gets is not known here");
  return *rows / std::max<std::int64_t>(1, call.batch());
}

Totals totals_of(const Communicator& world, const AttendCall& call, const Options& options,
                 bool any_parts) {
  Totals totals{call.total_keys, call.total_queries};
  const bool sharded = options.queries.has_value(),
             ask_keys = totals.keys < 0 && !call.cache_seqlens;
  const int ranks = world.size();
  bool ask = ask_keys || (sharded && totals.queries < 0);
  if (sharded && totals.queries >= 0) {
    for (int r = 0; r < ranks && any_parts; ++r) {
      const auto rows = rows_of_rank(call, *options.queries, totals.queries, r, ranks);
      const bool by_table =
          options.queries->layout == Layout::ranges || options.queries->layout == Layout::listed;
      ask = ask || (!rows && by_table);
      totals.most_queries =
          std::max(totals.most_queries,
                   rows       ? *rows
                   : by_table ? 0
                              : most_rows(call, *options.queries, totals.queries, ranks));
    }
  }
  if (ranks == 1 || !ask) {
    if (!call.contradiction.empty()) throw InputError(call.contradiction);
    check_own_part(call, options.keys, world);
    if (ask_keys) totals.keys = call.own_keys();
    if (sharded && totals.queries < 0) totals.queries = call.tokens();
    if (ranks == 1) totals.most_queries = call.tokens() * call.batch();
    return totals;
  }
  const PartReport own{
      {ask_keys ? call.own_keys() : 0, call.tokens(), call.whole_keys, call.whole_queries},
      text_of(options.keys),
      sharded ? text_of(*options.queries) : "None",
      call.contradiction};
  std::vector<PartReport> all;
  for (const std::string& text : world.gather(
           own.text(), "count of keys and query rows (total_keys or total_queries is not given)"))
    all.push_back(PartReport::of(text));
  check_reports(all, world.rank());
  std::int64_t keys = 0, rows = 0;
  for (const PartReport& report : all) {
    keys += report.numbers[0];
    rows += report.numbers[1];
    totals.most_queries = std::max(totals.most_queries, report.numbers[1] * call.batch());
  }
  if (ask_keys) {
    totals.keys = keys;
    totals.key_ends = ends_of(all, kKeys, options.keys, keys, any_parts);
  } else {
    check_own_part(call, options.keys, world);
  }
  if (sharded && totals.queries < 0) {
    totals.queries = rows;
    if (!call.cu_seqlens_q)
      totals.query_ends = ends_of(all, kRows, *options.queries, rows, any_parts);
  }
  return totals;
}

std::vector<std::int64_t> listed_rows(const AttendCall& call, std::int64_t rows,
                                      std::int64_t entries) {
  const Tensor& table = call.query_table.tensor();
  if (table.dims != 1 || table.dtype != DType::int64)
    throw InputError("query_table is " + shape_text(table) + " of " + dtype_name(table.dtype) +
                     "; a vector of int64 is wanted, the position of each row");
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < table.shape[0]; ++i)
    if (i < rows || entry(table, i) != -1) values.push_back(entry(table, i));
  if (static_cast<std::int64_t>(values.size()) != rows)
    throw InputError("query_table has " + std::to_string(values.size()) +
                     " positions; this rank has " + std::to_string(rows) +
                     " rows, and past them stands -1");
  values.resize(static_cast<std::size_t>(entries), -1);
  return values;
}

void set_lengths(AttentionArgs& args, const AttendCall& call, const Totals& totals,
                 bool sharded_queries, std::int64_t batch, Device device, UniformArrays& arrays) {
  const std::int64_t rows = sharded_queries ? totals.queries : call.tokens();
  if (batch > 1 && !args.query_start) args.query_start = arrays.steps(device, batch + 1, rows);
  if (!args.kv_len) {
    if (batch > 1)
      args.kv_len = arrays.constant(device, batch, totals.keys);
    else
      args.total_keys = totals.keys;
  } else if (call.total_keys >= 0) {
    throw InputError("total_keys and cache_seqlens are given; lengths stand in one of them");
  }
  if (sharded_queries)
    args.total_tokens = rows * (call.batched() && call.cu_seqlens_q.tensor().dims == 0 ? batch : 1);
}

}  // namespace longspan::python
