// Describes what ranks must give alike in a run of a layer (design contract 8). One walk over the
// table of arguments (option_table.hpp) makes the hash that travels with the data and the texts of
// the error, so both cover the same fields. Options are compared once, when the layer is made
// (validate.hpp). Fields that may differ between ranks are in that table too. A merge across ranks
// has the same, with fewer fields.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/control/agreement.hpp"
#include "kernels/digest.hpp"
#include "longspan/attention.hpp"
#include "longspan/merge.hpp"

namespace longspan {

/// A field of the options or the arguments of a layer, a merge across ranks or a reshard that may
/// differ between ranks, and why.
struct OwnField {
  std::string name;
  const char* why;
};
std::vector<OwnField> own_fields();

/// The options of a merge across ranks that ranks must give alike; those of a layer are in
/// validate.hpp.
NamedValues describe(const MergeOptions& options, LogBase base);

/// Describes one run as a rank was asked for it.
class RunDescription {
 public:
  /// Describes a run without arguments that must be alike, such as a reshard.
  RunDescription() = default;
  /// The arguments were checked. `reads_arrays`: the arrays lie in memory of this CPU, and their
  /// first values are kept for the texts.
  RunDescription(const AttentionArgs& args, const Options& options, bool reads_arrays);
  /// Describes a backward, whose arguments were checked.
  RunDescription(const GradientArgs& args, const Options& options, bool reads_arrays);
  /// Describes a merge across ranks, whose arguments were checked.
  RunDescription(const MergeArgs& args, const MergeOptions& options, bool reads_arrays);
  /// Describes the same without reading the arrays and without checked arguments, as far as it is
  /// known.
  RunDescription(const AttentionArgs& args, const Options& options);
  RunDescription(const GradientArgs& args, const Options& options);
  explicit RunDescription(const MergeArgs& args);

  /// The hash of all but the contents of arrays.
  std::uint64_t hash() const;
  /// The arrays whose contents must be alike too, for AttentionKernels::digest. It leaves
  /// the digests in `words`, and then the stamp behind them.
  kernels::DigestParams arrays(std::uint64_t* words, std::uint64_t stamp) const;
  /// Names and values. AttentionKernels::digest, called with the stamp, writes its digests to
  /// `words` [arrays + 2]. Until it has, values that need the digests are unknown
  /// (comm::kNotKnown). Null: digest was not called.
  NamedValues text(const std::uint64_t* words, std::uint64_t stamp) const;

 private:
  enum class Kind : std::uint8_t { number, yes_no, given, dtype };
  struct Value {
    const char* name;
    std::int64_t value;
    Kind kind;
  };
  struct Array {
    static constexpr int kShown = 6;
    const char* name;
    kernels::DigestArray where;
    DType dtype;
    std::array<std::uint64_t, kShown> first;  // bits
    int shown;
  };

  struct Backward {
    bool yes;
  };
  RunDescription(const AttentionArgs& args, const Options& options, Backward backward);
  void add_arrays(const AttentionArgs& args, const Options& options, bool reads_arrays);
  void number(const char* name, std::int64_t value, Kind kind = Kind::number);
  void array(const char* name, const Tensor& values);
  std::string text_of(const Value& value) const;
  enum class Digests { none, awaited, there };
  std::string text_of(const Array& array, Digests digests, std::uint64_t digest) const;

  static constexpr int kMostValues = 48;
  std::array<Value, kMostValues> values_{};
  int count_ = 0;
  std::array<Array, kernels::DigestParams::kMostArrays> arrays_{};
  int array_count_ = 0;
  bool reads_arrays_ = false;
};

/// The options of a layer and its last runs, for the roll call. A run that is captured in a graph
/// keeps its entry until the log has taken as many later runs as it holds.
class RunHistory final : public comm::RunLog {
 public:
  static constexpr std::uint32_t kRuns = 64;
  static constexpr std::size_t kWordsOfRun = kernels::DigestParams::kMostArrays + 2;

  /// `made_with` are the options that all ranks give alike.
  explicit RunHistory(NamedValues made_with);

  /// Sets the layer's number among those of its communicator, known once the history is enlisted
  /// there.
  void set_layer(std::uint32_t number);

  /// Compares the contents of arrays too. AttentionKernels::digest writes to `words` [kRuns,
  /// kWordsOfRun], in memory that the host reads.
  void compare_contents(std::shared_ptr<std::uint64_t> words) { words_ = std::move(words); }

  /// Stores the description as the next run and returns its number.
  std::uint32_t add(const RunDescription& description);
  /// The hash of the options and the number of the layer.
  std::uint64_t hash() const { return hash_; }
  /// The run's place for digests, or null.
  std::uint64_t* words(std::uint32_t run) const;

  /// The options, and for a run its number and arguments.
  NamedValues describe(std::uint32_t run) const override;
  /// The same for a refused call, which would have been the next run.
  NamedValues describe_next(const RunDescription& refused) const;

 private:
  NamedValues describe(std::uint32_t run, NamedValues given) const;
  void add_option(std::string name, std::string value);

  NamedValues made_with_;
  std::uint64_t hash_ = 0;
  std::shared_ptr<std::uint64_t> words_;
  std::array<RunDescription, kRuns> runs_;
  std::uint32_t last_ = 0;
};

}  // namespace longspan
