// The names in messages that differ in Python. Those of options and arguments come from their
// tables (longspan/option_table.hpp); here are others, and special cases. An entry is a whole word
// of a message, which may have dots ("dtypes.out"). A name that is also an English word is marked.
// It counts as a name only where a message is about the argument: at its start, where it differs
// between ranks, or where another argument overlaps it.
#include "python/src/names.hpp"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <string_view>
#include <vector>

#include "longspan/option_table.hpp"

namespace longspan::python {
namespace {

enum class Where : std::uint8_t { anywhere, as_subject };

struct Name {
  Function function;
  std::string_view cpp, python;
  Where where = Where::anywhere;
};

using enum Function;
constexpr Where kSubject = Where::as_subject;

#if !defined(LONGSPAN_HAVE_CUDA)
constexpr std::string_view kHowToGetCuda = LONGSPAN_WITHOUT_CUDA
    ". `LONGSPAN_CUDA=ON pip install .` in its repository builds the CUDA part";
#endif

constexpr Name kNames[] = {
    // Names of one function come before those of all functions.
    {attend, "dtypes.compute", "q.dtype"},
    {attend, "dtypes.query", "q.dtype"},
    {attend, "dtypes.kv", "k.dtype"},
    {attend, "dtypes.out", "out.dtype"},
    {attend, "max_tokens", "rows of q, rounded up"},
    {attend, "max_batch", "number of sequences"},
    {layer, "dtypes.compute", "dtype"},
    {layer, "dtypes.query", "q_dtype"},
    {layer, "dtypes.kv", "kv_dtype"},
    {layer, "dtypes.out", "out_dtype"},
    {merge_state, "prefix_output", "v_a"},
    {merge_state, "prefix_out", "v_a"},
    {merge_state, "prefix_lse", "s_a"},
    {merge_state, "suffix_output", "v_b"},
    {merge_state, "suffix_out", "v_b"},
    {merge_state, "suffix_lse", "s_b"},
    {merge_states, "parts", "v", kSubject},
    {merge_states, "lses", "s", kSubject},
    {cross_rank_merge, "dtype", "part.dtype", kSubject},
    {cross_rank_merge, "out_dtype", "out.dtype"},
    {cross_rank_merge, "max_tokens", "tokens of part, rounded up"},
    {cross_rank_merge, "value_dim", "columns of part", kSubject},
    {cross_rank_merge, "heads", "heads of part", kSubject},
    {reshard, "from.table", "key_table"},
    {reshard, "from.rule", "keys"},
    {reshard, "from.first_rank", "the first of ranks"},
    {reshard, "from.ranks", "the number of ranks"},
    {reshard, "from has listed keys", "keys are listed", kSubject},
    {reshard, "from has", "keys has", kSubject},
    {reshard, "from is on", "ranks: the cache is on", kSubject},
    {reshard, "to.table", "to_key_table"},
    {reshard, "to.rule", "to_keys"},
    {reshard, "to.first_rank", "the first of to_ranks"},
    {reshard, "to.ranks", "the number of to_ranks"},
    {reshard, "to has listed keys", "to_keys are listed", kSubject},
    {reshard, "to has", "to_keys has", kSubject},
    {reshard, "to is on", "to_ranks: the cache is on", kSubject},
    {reshard, "from first_rank on", "the first on"},
    {any, "scale", "softmax_scale", kSubject},
    {any, "window", "window_size (left + 1)", kSubject},
    {any, "right", "window_size (right)", kSubject},
    {any, "chunk", "attention_chunk", kSubject},
    {any, "lookback", "chunk_lookback", kSubject},
    {any, "bidirectional.count", "the number of bidirectional ranges"},
    {any, "prefix_out", "prefix_output"},
    {any, "suffix_out", "suffix_output"},
    {any, "out_lse", "lse"},
    {any, "slots", "slot_mapping", kSubject},
    {any, "documents.count", "the number of documents"},
    {any, "qq_bias.width", "the width of qq_bias"},
    {any, "dtypes.compute", "dtype"},
    {any, "dtypes.query", "q.dtype"},
    {any, "dtypes.kv", "k.dtype"},
    {any, "dtypes.out", "out.dtype"},
    {any, "fp64", "float64"},
    {any, "fp32", "float32"},
    {any, "fp16", "float16"},
    {any, "bf16", "bfloat16"},
    {any, "e4m3", "float8_e4m3fn"},
    {any, "e5m2", "float8_e5m2"},
#if !defined(LONGSPAN_HAVE_CUDA)
    // The library's advice on getting CUDA is for CMake; users of pip do it in another way.
    {any, "configure with -DLONGSPAN_CUDA=ON", kHowToGetCuda},
    {any, "rebuild with -DLONGSPAN_CUDA=ON", kHowToGetCuda},
    {any, "device host", "device 'cpu'"},
#endif
};

/// kNames, and the names that the tables of options and arguments have in Python.
const std::vector<Name>& all_names() {
  static const std::vector<Name> names = [] {
    std::vector<Name> all(std::begin(kNames), std::end(kNames));
    const auto add = [&](std::string_view cpp, const char* python) {
      const auto is_known = [&](const Name& n) { return n.function == any && n.cpp == cpp; };
      if (python != nullptr && cpp != python && std::none_of(all.begin(), all.end(), is_known))
        all.push_back({any, cpp, python});
    };
    const Options options;
    visit_options(options, [&](const OptionInfo& o, const auto&) { add(o.name, o.python); });
    const AttentionArgs args;
    visit_arguments(args, [&](const ArgumentInfo& a, const auto&) { add(a.name, a.python); });
    return all;
  }();
  return names;
}

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

/// The length of a word, with the dots that are inside of it.
std::size_t word_length(std::string_view text) {
  std::size_t end = 0;
  while (end < text.size() &&
         (is_word(text[end]) || (text[end] == '.' && end > 0 && end + 1 < text.size() &&
                                 std::islower(static_cast<unsigned char>(text[end + 1])))))
    ++end;
  return end;
}

/// The length of a quotation at the start of `remaining`: a caller's own word, which stays. 0 where
/// there is none, or where it is the name of what "differs between ranks".
std::size_t quotation_length(std::string_view remaining, std::string_view ahead) {
  const char quote = remaining[0];
  const bool opens = ahead.empty() || ahead.ends_with(' ') || ahead.ends_with('(');
  if (quote != '"' && (quote != '\'' || !opens)) return 0;
  const std::size_t end = remaining.find(quote, 1);
  if (end == std::string_view::npos || remaining.substr(end + 1).starts_with(" differs")) return 0;
  return end + 1;
}

/// The entry that `remaining` begins with, where `is_subject` means that it is about an argument;
/// null where none does.
const Name* entry_at(std::string_view remaining, Function function, bool is_subject) {
  for (const Name& name : all_names()) {
    if (name.function != any && name.function != function) continue;
    if (name.where == Where::as_subject && !is_subject) continue;
    if (!remaining.starts_with(name.cpp)) continue;
    const std::string_view after = remaining.substr(name.cpp.size());
    if (after.empty() || !is_word(after[0])) return &name;
  }
  return nullptr;
}

/// Reshard's messages about a cache, whose old and new place have arrays of one name.
std::string with_arrays_of(std::string_view message, bool is_target) {
  std::string made;
  if (message.starts_with("there is")) made = is_target ? "to_k and to_v: " : "k and v: ";
  while (!message.empty()) {
    const std::size_t length = word_length(message);
    const std::string_view word = message.substr(0, length);
    if (is_target && (word == "k" || word == "v" || word == "block_table")) made += "to_";
    const std::size_t taken = length > 0 ? length : 1;
    made += message.substr(0, taken);
    message.remove_prefix(taken);
  }
  return made;
}

}  // namespace

std::string with_python_names(const std::string& message, Function function) {
  std::string_view remaining = message;
  std::string made, of_cache;
  for (const std::string_view side : {"from: ", "to: "})
    if (function == reshard && remaining.starts_with(side)) {
      of_cache = with_arrays_of(remaining.substr(side.size()), side == "to: ");
      remaining = of_cache;
    }
  while (!remaining.empty()) {
    if (const std::size_t length = quotation_length(remaining, made); length > 0) {
      made += remaining.substr(0, length);
      remaining.remove_prefix(length);
      continue;
    }
    const std::size_t length = word_length(remaining);
    if (length == 0) {
      made += remaining[0];
      remaining.remove_prefix(1);
      continue;
    }
    if (remaining.substr(length).starts_with("::")) {  // Options::queries: the member
      remaining.remove_prefix(length + 2);
      continue;
    }
    const bool is_subject = made.empty() || made.ends_with('\'') || made.ends_with("overlaps ");
    if (const Name* const name = entry_at(remaining, function, is_subject)) {
      made += name->python;
      remaining.remove_prefix(name->cpp.size());
    } else {
      made += remaining.substr(0, length);
      remaining.remove_prefix(length);
    }
  }
  // An argument that was not given has a shape without dimensions.
  constexpr std::string_view kMissing = " [] has no data";
  if (const std::size_t at = made.find(kMissing); at != std::string::npos)
    made.replace(at, kMissing.size(), " is None; an array is wanted");
  return made;
}

}  // namespace longspan::python
