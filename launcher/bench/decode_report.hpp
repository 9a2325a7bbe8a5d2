// Reports what `longspan bench decode` measured, as a table and as JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "launcher/judge/judge.hpp"
#include "launcher/judge/report.hpp"
#include "launcher/options/options.hpp"
#include "longspan/communicator.hpp"

namespace longspan::launcher {

/// The measurements of one length.
struct DecodeRow {
  std::int64_t kv = 0;  // of each sequence before the first step, on all ranks together
  int caches = 1;
  std::size_t cache_bytes = 0;      // of one cache, on a rank
  std::size_t workspace_bytes = 0;  // of the layer, on rank 0
  std::vector<double> times;        // ms; for each step that of the slowest rank
  Spread time;
  // Parts of the median step, in ms: the slowest rank's appends, its attention over its own keys,
  // and the rest, which is the exchange with its merge.
  double append = 0, attend = 0, exchange = 0;
  double bandwidth = 0;  // GB/s of keys and values that a rank reads, over the whole step

  std::int64_t alone_kv = 0;    // of each sequence before the first step
  std::optional<Spread> alone;  // ms of a step on rank 0 alone
  std::string not_alone;        // why that time is missing
  std::optional<double> efficiency;

  std::optional<Judgement> check;
  std::uint64_t digest = 0;
};

struct DecodeReport {
  std::string backend, world, exchange_by;
  Machine machine;  // by whose constants the strategy was chosen
  int ranks = 1, threads = 1;
  DecodeOptions options;  // with no choice left open
  std::uint64_t seed = 0;
  std::vector<DecodeRow> rows;
};

/// The lines after the title, and a row.
std::string header(const DecodeReport& report);
std::string row(const DecodeReport& report, const DecodeRow& row);
nlohmann::ordered_json to_json(const DecodeReport& report);

}  // namespace longspan::launcher
