// The command line as data. Parsing prints nothing and does not exit: under mpirun every rank
// parses, and the output (printed once) is decided when the ranks know each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launcher/options/model_options.hpp"
#include "launcher/options/reshard_options.hpp"
#include "longspan/communicator.hpp"
#include "longspan/exchange.hpp"
#include "longspan/mask.hpp"
#include "longspan/options.hpp"
#include "longspan/shard.hpp"

namespace longspan::launcher {

/// The options of every command that computes.
struct WorldOptions {
  std::string backend = "auto";  // auto, host or cuda; a build that simulates: simulated, for cuda
  Exchange exchange = Exchange::automatic;  // of every layer
  double deadline_s = 0;                    // 0: LONGSPAN_DEADLINE_S, or else 60
  int threads = 0;                          // 0: this rank's share of the cores
  std::uint64_t seed = 0;                   // of generated inputs

  std::chrono::milliseconds deadline() const {
    return std::chrono::milliseconds(static_cast<std::int64_t>(deadline_s * 1000));
  }
};

struct RunOptions {
  // Inputs come from files, or (when q is empty) are made from a seed.
  std::string q, k, v, sinks;
  std::int64_t kv = 16384;    // keys of each sequence
  std::int64_t tokens = 256;  // query rows of each sequence
  int batch = 1;
  std::vector<std::int64_t> lengths;  // keys and query rows of each sequence, in place of these
  int heads = 8;
  int kv_heads = 0;  // 0: heads
  int dim = 64;
  int value_dim = 0;  // 0: dim
  bool values_in_keys = false;
  std::string dtype;      // empty: that of the files; fp32 without files
  std::string qkv_dtype;  // the fp8 type of stored q, k and v, with scales of 1; empty: dtype

  // The attention.
  Mask mask;
  ScoreOptions score;
  std::string alibi;  // the name of an Alibi; empty: no slopes
  RopeOptions rope;   // of q; k is taken as rotated
  DropoutOptions dropout;
  std::optional<std::int64_t> dropout_seed;  // of its mask; the seed of inputs, if not given
  std::vector<std::int64_t> documents;       // their starts and the end, in every sequence
  std::vector<std::int64_t> bidirectional;   // ranges of every sequence: begin, end ...
  std::vector<std::int64_t> left_padding;    // of each sequence, or one number for all
  int top_k = 0;                             // keys that a row names; 0: the mask says what it sees
  bool fp8_products = false;
  bool bf16_products = false;

  // Its backward.
  bool backward = false;
  std::string dout, dlse;  // from files; made from the seed with q
  bool fp32_gradients = false;
  std::string dq, dk, dv, dsinks;

  // Its distribution.
  std::string shard = "contiguous";  // as given
  Layout layout = Layout::contiguous;
  std::int64_t block = kSegment;
  bool shard_queries = false;
  bool invariant = false;
  std::string strategy = "auto";
  int ranks_per_node = 0;  // 0: those that share a machine
  bool explain = false;    // print why

  // Measuring and checking.
  int iterations = 5;
  int warmup = 1;
  std::int64_t check = 16;    // rows that are compared with float64; -1: all
  bool write_anyway = false;  // write outputs that the check finds wrong, too
  bool digest = false;

  std::string out, lse, json;
};

struct VerifyOptions {
  enum class Size { quick, standard, full } size = Size::standard;
  std::vector<std::string> families;  // empty: all
};

/// The options of `longspan bench decode`. Some defaults are smaller on CPUs.
struct DecodeOptions {
  std::vector<std::int64_t> kv;  // keys of each sequence before the first step, with a row of the
                                 // table for each; empty: 131072 on GPUs, 16384 on CPUs
  bool weak = false;             // kv is for each rank
  int batch = 1;
  int tokens = 1;  // new tokens of each sequence in a step
  int heads = 64;
  int kv_heads = 8;
  int dim = 128;
  std::string dtype = "bf16";
  std::string kv_dtype;   // empty: dtype
  int page = 0;           // keys in a page; 0: no pages
  int layers = 0;         // 0: 32 on GPUs, 4 on CPUs
  double memory_gib = 0;  // for the caches of a GPU, or of the host; 0: by the free memory

  std::string shard = "interleaved";
  Layout layout = Layout::interleaved;
  std::int64_t block = kSegment;
  bool invariant = false;

  int iterations = 0;     // timed steps; 0: 30 on GPUs, 5 on CPUs
  int warmup = 3;         // steps before them
  int check = 4;          // samples that are compared with float64
  bool no_alone = false;  // otherwise rank 0 also does the whole problem alone
  std::string json;
};

struct CommandLine {
  enum class Action {
    say,
    run,
    verify,
    bench_decode,
    bench_scale,
    calibrate,
    plan,
    reshard,
    info,
    env,
    list_strategies
  } action = Action::say;
  std::string command;  // its name; empty: none
  std::string text;     // print: help or the version
  std::string error;    // print: the error in the command line; exit status usage
  NamedValues given;    // every option of the command as text: ranks must agree on them

  WorldOptions world;
  RunOptions run;
  VerifyOptions verify;
  DecodeOptions decode;
  CalibrateOptions calibrate;
  PlanOptions plan;
  ReshardCommand reshard;
  ScaleOptions scale;
  bool json = false;      // info, env
  bool features = false;  // info
  bool kernels = false;   // likewise
  bool options = false;   // likewise
};

CommandLine parse(int argc, char** argv);

}  // namespace longspan::launcher
