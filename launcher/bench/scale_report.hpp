// Keeps the measurements of `longspan bench scale` for the table, the CSV and the JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "launcher/judge/judge.hpp"
#include "launcher/judge/report.hpp"

namespace longspan::launcher {

/// One problem on `ranks` ranks by one strategy.
struct ScaleRow {
  std::string phase, strategy;
  std::string no;           // why it is unsupported; then the rest is empty
  std::string not_by_auto;  // why "auto" skips it, although it is supported
  int ranks = 1;
  std::int64_t kv = 0, tokens = 0;
  bool chosen = false;                      // by "auto"
  bool fastest = false;                     // of its problem
  Spread time;                              // ms; in training of forward and backward together
  std::optional<Spread> forward, backward;  // ms; in training
  double predicted = 0;                     // ms
  double balance = 1;
  double attend = 0, exchange = 0, merge = 0;  // shares of the (forward's) time, sum 1
  double received_bytes = 0;                   // by a rank in a run, from the formula
  double counted_bytes = 0;                    // by the rank that received most, as it counted
  std::size_t workspace_bytes = 0;
  std::size_t peer_bytes = 0;        // in addition, memory that peers write
  std::optional<double> peak_bytes;  // of the rank that grew most, arrays included; on the host
  std::optional<double> efficiency;  // against one rank
  std::optional<Judgement> check;
};

struct ScaleReport {
  std::string backend, world;
  Machine machine;  // by whose constants "auto" chooses
  int threads = 1;
  RunOptions shape;  // heads, dims, dtype, batch
  std::string shard;
  bool weak = false;
  bool graph = false;  // times are those of replays
  std::uint64_t seed = 0;
  std::vector<ScaleRow> rows;
};

/// Write the lines that begin with '#', the row, and the result of "auto".
std::string header(const ScaleReport& report);
std::string row(const ScaleRow& row);
std::string summary(const ScaleReport& report);

std::string to_csv(const ScaleReport& report);
nlohmann::ordered_json to_json(const ScaleReport& report);

}  // namespace longspan::launcher
