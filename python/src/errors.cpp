#include "python/src/errors.hpp"

#include <nanobind/stl/string.h>

#include <cctype>
#include <exception>
#include <string_view>
#include <utility>

#include "longspan/error.hpp"

namespace longspan::python {
namespace {

/// The C++ name of an argument, and what the Python functions call it.
constexpr std::pair<std::string_view, std::string_view> kNames[] = {
    {"kv_len", "cache_seqlens"},
    {"query_start", "cu_seqlens_q"},
    {"new_k", "k_new"},
    {"new_v", "v_new"},
    {"q_scale", "q_descale"},
    {"k_scale", "k_descale"},
    {"v_scale", "v_descale"},
    {"slopes", "alibi_slopes"},
    {"total_tokens", "total_queries"},
    {"max_kv_len", "max_seqlen_k"},
    {"max_query_len", "max_seqlen_q"},
    {"max_tokens", "max_queries"},
    {"prefix_out", "prefix_output"},
    {"suffix_out", "suffix_output"},
    {"out_lse", "lse"},
    {"slots", "slot_mapping"},
    {"workspace", "workspace"},
};

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

std::string_view python_name(std::string_view word) {
  for (const auto& [cpp, python] : kNames)
    if (word == cpp) return python;
  return word;
}

const char* class_of(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::usage:
      return "UsageError";
    case ErrorKind::input:
      return "InputError";
    case ErrorKind::unsupported:
      return "UnsupportedError";
    case ErrorKind::rank_failure:
    case ErrorKind::timeout:
      return "RankError";
    case ErrorKind::backend:
      return "BackendError";
    default:
      return "InternalError";
  }
}

void raise(const Error& error) {
  const nb::object type = nb::module_::import_("longspan._errors").attr(class_of(error));
  const std::string message = with_python_names(error.what());
  if (const auto* of_rank = dynamic_cast<const RankError*>(&error)) {
    const nb::object made = type(message, of_rank->rank(), of_rank->step());
    PyErr_SetObject(type.ptr(), made.ptr());
    return;
  }
  PyErr_SetString(type.ptr(), message.c_str());
}

}  // namespace

std::string with_python_names(const std::string& message) {
  std::string made;
  for (std::size_t i = 0; i < message.size();) {
    if (!is_word(message[i])) {
      made += message[i++];
      continue;
    }
    std::size_t end = i;
    while (end < message.size() && is_word(message[end])) ++end;
    const bool qualifies = message.compare(end, 2, "::") == 0;  // Options::queries: the member
    if (qualifies)
      end += 2;
    else
      made += python_name(std::string_view(message).substr(i, end - i));
    i = end;
  }
  return made;
}

void translate_errors() {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      if (PyErr_Occurred() != nullptr) return;  // the call ended because of it: KeyboardInterrupt
      // What stands in the message of an error in Python's own code is raised as it is.
      try {
        raise(error);
      } catch (nb::python_error& failed) {
        failed.restore();
      }
    }
  });
}

}  // namespace longspan::python
