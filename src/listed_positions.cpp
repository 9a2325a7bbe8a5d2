#include "src/listed_positions.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>

#include "kernels/digest.hpp"
#include "longspan/error.hpp"
#include "src/divided_up.hpp"

namespace longspan {
namespace {

/// The word of a position: output `position` of splitmix64, whose finalizer is a bijection.
std::uint64_t word_of(std::int64_t position) {
  return kernels::mix(0x9e3779b97f4a7c15u * (static_cast<std::uint64_t>(position) + 1));
}

}  // namespace

void ListedPositions::Sums::add(std::int64_t position) {
  ++count;
  sum += word_of(position);
}

const ListedPositions::Sums& ListedPositions::Whole::of(std::int64_t length) {
  if (length < sums_.count - length) sums_ = {};  // it is shorter to begin anew than to go back
  while (sums_.count < length) sums_.add(sums_.count);
  while (sums_.count > length) sums_.sum -= word_of(--sums_.count);
  return sums_;
}

ListedPositions::Sums ListedPositions::sums_of(std::span<const std::int64_t> table) {
  Sums sums;
  for (const std::int64_t position : table) sums.add(position);
  return sums;
}

ListedPositions::ListedPositions(comm::Transport& comm, const Options& options)
    : comm_(comm),
      keys_(options.keys.layout == Layout::listed),
      rows_(options.queries && options.queries->layout == Layout::listed) {
  if (comm.device() != Device::host || !(keys_ || rows_)) return;
  said_.resize(static_cast<std::size_t>(comm.size()));
  keys_of_rank_.resize(said_.size());
}

void ListedPositions::check(Run& run) {
  const auto table_of = [](const Shard& shard) {
    return std::span(shard.table, static_cast<std::size_t>(shard.listed));
  };
  const Shard &keys = run.arrays.keys, &rows = run.arrays.queries;
  Said& own = said_[static_cast<std::size_t>(comm_.rank())];
  own = {};
  if (keys_) own.keys = sums_of(table_of(keys));
  if (rows_) own.rows = sums_of(table_of(rows));
  if (comm_.size() > 1)
    comm_.all_gather(&own, said_.data(), sizeof own, run.stream, "sums of listed positions",
                     run.said);
  run.said = nullptr;
  Said all;
  for (std::size_t p = 0; p < said_.size(); ++p) {
    all.keys.add(said_[p].keys);
    all.rows.add(said_[p].rows);
    keys_of_rank_[p] = said_[p].keys.count;
  }
  const std::int64_t length = run.attend.batch.keys(0, keys), tokens = run.args.total_tokens;
  if (keys_ && all.keys != whole_keys_.of(length))
    find("key_table", table_of(keys), length, all.keys.count, run.stream);
  if (rows_ && all.rows != whole_rows_.of(tokens))
    find("query_table", table_of(rows), tokens, all.rows.count, run.stream);
  if (keys_) run.listed_keys = keys_of_rank_.data();
}

void ListedPositions::find(const char* name, std::span<const std::int64_t> table,
                           std::int64_t length, std::int64_t listed, Stream stream) const {
  constexpr std::int64_t kParts = 64;
  std::vector<Sums> parts(said_.size() * kParts);  // [ranks, kParts]
  const auto own =
      std::span(parts).subspan(static_cast<std::size_t>(comm_.rank()) * kParts, kParts);
  std::int64_t begin = 0, end = length, step = 0;
  const auto is_right = [&](std::size_t part) {
    Sums found, wanted;
    for (std::size_t p = 0; p < said_.size(); ++p) found.add(parts[p * kParts + part]);
    for (std::int64_t position = begin; position < begin + step; ++position) wanted.add(position);
    return found == wanted;
  };
  std::size_t part = 0;
  // What the parts lack or have twice adds up to what the whole does, so that one of them is wrong.
  while (step != 1) {
    step = std::max<std::int64_t>(1, divided_up(end - begin, kParts));
    std::fill(own.begin(), own.end(), Sums{});
    for (const std::int64_t position : table)
      if (position >= begin && position < end)
        own[static_cast<std::size_t>((position - begin) / step)].add(position);
    if (comm_.size() > 1)
      comm_.all_gather(own.data(), parts.data(), own.size_bytes(), stream,
                       "search among listed positions");
    for (part = 0; begin + step < end && is_right(part); ++part) begin += step;
    end = std::min(begin + step, end);
  }
  std::vector<std::string> who;
  for (std::size_t p = 0; p < said_.size(); ++p)
    if (const std::int64_t times = parts[p * kParts + part].count; times > 0)
      who.push_back(fmt::format("rank {}{}", comm_.name_of(static_cast<int>(p)),
                                times > 1 ? fmt::format(" {} times", times) : ""));
  if (who.empty()) who.emplace_back("no rank");
  throw InputError(fmt::format(
      "{}: position {} is listed by {}. Each of the {} positions must be listed once, by "
      "one rank; the ranks list {} in all",
      name, begin, fmt::join(who, " and "), length, listed));
}

}  // namespace longspan
