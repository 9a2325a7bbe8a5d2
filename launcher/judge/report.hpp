// Keeps the measurements of a run, as one record, for the table, the JSON and the exit status.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launcher/judge/judge.hpp"
#include "launcher/options/options.hpp"
#include "launcher/problem/problem.hpp"
#include "longspan/machine.hpp"

namespace longspan::launcher {

/// One timed run on one rank, in milliseconds.
struct Sample {
  double time = 0;  // of the forward
  Phases phases;
  double backward = 0;
};

struct Spread {
  double median = 0, min = 0, max = 0;
};

double median(std::vector<double> values);
Spread spread_of(const std::vector<double>& values);
nlohmann::ordered_json to_json(const Spread& spread);
nlohmann::ordered_json to_json(const Judgement& judgement);
/// Where the constants come from.
nlohmann::ordered_json to_json(const Machine& machine);

/// Texts for tables: "2.00 GiB", and milliseconds with the significant digits.
std::string size_text(std::size_t bytes);
std::string ms_text(double ms);

using ScoreNumbers = std::vector<std::pair<std::string, float>>;

struct Report {
  // What ran.
  std::string strategy, backend, world;
  std::string exchange_by;  // how states travel, with the reason where it is not by peer buffers
  int ranks = 1;
  std::int64_t kv = 0, tokens = 0;  // the most of any one sequence
  std::int64_t rows = 0;            // query rows of the batch
  int batch = 1, heads = 1, kv_heads = 1, dim = 0, value_dim = 0;
  std::string dtype, qkv_dtype, shard, inputs;
  bool fp8_products = false;
  bool bf16_products = false;
  bool values_in_keys = false;
  int top_k = 0;
  bool shard_queries = false, invariant = false, causal = false;
  std::int64_t window = 0;
  ScoreNumbers score;
  RopeOptions rope;
  DropoutOptions dropout;
  std::int64_t dropout_seed = 0;
  std::string alignment;              // of the rows
  std::string alibi;                  // empty: none
  std::vector<std::int64_t> lengths;  // of the sequences, where they were given one by one
  std::size_t workspace_bytes = 0;    // of the rank that needs most
  std::size_t peer_bytes = 0;         // in addition, memory that peers write
  Machine machine;                    // by whose constants the strategy was chosen

  // Its speed.
  std::vector<double> times;  // ms; for each run that of the slowest rank
  Spread time;                // ms
  double tflops = 0;
  bool goes_back = false;
  std::vector<double> backward_times;  // ms, of the backward; `times` are of the forward
  Spread backward;                     // ms
  double backward_tflops = 0;
  double attend = 0, exchange = 0, merge = 0;  // shares of the forward's time, sum 1
  double exchange_ms = 0;  // of the rank that waited least for late ones; median of the runs
  double busbw = 0;        // GB/s that a rank receives while it exchanges

  // Its errors.
  std::optional<Judgement> judgement;
  std::optional<std::uint64_t> digest;
};

/// The plain numbers of a score, with their names: 0 where they are off.
ScoreNumbers score_numbers(const ScoreOptions& options);

/// " rope 64 interleaved theta 10000 scale 1"; empty without RoPE.
std::string rope_text(const RopeOptions& rope);

/// Describes the run. Collective.
Report describe(const Communicator& world, const Problem& problem, const RunOptions& options,
                const Attention& layer);

/// Adds its speed. Collective.
void measure(const Communicator& world, const Problem& problem, const std::vector<Sample>& samples,
             Report& report);

/// The line with the version, the device and the ranks.
std::string title(const Communicator& world);
/// The line with the source of the constants.
std::string constants_line(const Machine& machine);
/// A record in its written form. Bytes of names and variables that are not UTF-8, as JSON must be,
/// become U+FFFD.
std::string json_text(const nlohmann::ordered_json& record);
/// A time with a suitable unit.
std::string time_text(double seconds);

/// Write the other lines that begin with '#', and the row.
std::string header(const Report& report);
std::string row(const Report& report);

nlohmann::ordered_json to_json(const Report& report);

}  // namespace longspan::launcher
