#include "python/src/dtypes.hpp"

#include <nanobind/stl/string.h>

#include <bit>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "longspan/error.hpp"
#include "python/src/odd_arrays.hpp"
#include "python/src/words.hpp"

namespace longspan::python {
namespace {

struct TypeName {
  const char* name;
  DType dtype;
};
constexpr TypeName kTypes[] = {
    {"float32", DType::fp32},        {"float16", DType::fp16},
    {"bfloat16", DType::bf16},       {"float8_e4m3fn", DType::e4m3},
    {"float8_e5m2", DType::e5m2},    {"int32", DType::int32},
    {"int64", DType::int64},         {"uint8", DType::uint8},
    {"bool", DType::uint8},          {"fp32", DType::fp32},
    {"fp16", DType::fp16},           {"bf16", DType::bf16},
    {"e4m3", DType::e4m3},           {"e5m2", DType::e5m2},
    {"float64", DType::fp64},        {"fp64", DType::fp64},
    {"latent656", DType::latent656}, {"latent656_pow2", DType::latent656_pow2},
    {"latent584", DType::latent584}, {"latent528", DType::latent528},
    {"latent352", DType::latent352},
};

std::optional<DType> dtype_named(std::string_view name) {
  for (const TypeName& type : kTypes)
    if (name == type.name) return type.dtype;
  return std::nullopt;
}

}  // namespace

const char* dtype_name(DType dtype) {
  for (const TypeName& type : kTypes)
    if (type.dtype == dtype) return type.name;
  return "no type";
}

DType dtype_of(nb::handle given, const char* name) {
  std::string found;
  if (PyUnicode_Check(given.ptr())) {
    found = text(given, name);
  } else if (PyType_Check(given.ptr())) {  // numpy.float32, ml_dtypes.bfloat16
    found = nb::cast<std::string>(given.attr("__name__"));
  } else if (nb::hasattr(given, "name")) {  // numpy.dtype
    found = nb::cast<std::string>(nb::str(nb::object(given.attr("name"))));
  } else {  // torch.bfloat16
    found = nb::cast<std::string>(nb::str(given));
  }
  if (found.starts_with("torch.")) found.erase(0, 6);
  if (const auto dtype = dtype_named(found)) return *dtype;
  if (PyUnicode_Check(given.ptr()))
    throw InputError(std::string(name) + " is '" + found +
                     "'; float32, float16, bfloat16, float8_e4m3fn and float8_e5m2 are supported, "
                     "on CPUs also float64; and for rows of latent keys that carry their scales "
                     "latent656, latent656_pow2, latent584, latent528 and latent352");
  wrong_type(given, name, "a dtype, as 'bfloat16'");
}

std::optional<DType> dtype_of_format(const char* format, Py_ssize_t size) {
  std::string_view code = format == nullptr ? "B" : format;
  if (!code.empty() && std::string_view("@=<>!").find(code[0]) != std::string_view::npos) {
    const bool is_big = code[0] == '>' || code[0] == '!';
    if (is_big && size > 1 && std::endian::native == std::endian::little) return std::nullopt;
    code.remove_prefix(1);
  }
  if (code == "d") return DType::fp64;
  if (code == "f") return DType::fp32;
  if (code == "e") return DType::fp16;
  if (code == "B" || code == "?") return DType::uint8;
  if (code == "i" || code == "l" || code == "q" || code == "n")
    return size == 4 ? DType::int32 : size == 8 ? std::optional(DType::int64) : std::nullopt;
  return std::nullopt;
}

std::optional<DType> dtype_of_dlpack(dlpack::Type type) {
  if (type.lanes != 1) return std::nullopt;
  if (type.code == dlpack::kFloat && type.bits == 64) return DType::fp64;
  if (type.code == dlpack::kFloat && type.bits == 32) return DType::fp32;
  if (type.code == dlpack::kFloat && type.bits == 16) return DType::fp16;
  if (type.code == dlpack::kBfloat && type.bits == 16) return DType::bf16;
  if (type.code == dlpack::kFloat8E4m3fn && type.bits == 8) return DType::e4m3;
  if (type.code == dlpack::kFloat8E5m2 && type.bits == 8) return DType::e5m2;
  if (type.code == dlpack::kInt && type.bits == 32) return DType::int32;
  if (type.code == dlpack::kInt && type.bits == 64) return DType::int64;
  if ((type.code == dlpack::kUInt || type.code == dlpack::kBool) && type.bits == 8)
    return DType::uint8;
  return std::nullopt;
}

/// By the dtype object, so that a name is parsed once; the objects are kept, since their address is
/// the key.
std::optional<DType> added_dtype(nb::handle array) {
  static auto* known =
      new std::vector<std::pair<PyObject*, std::optional<DType>>>;  // under the GIL
  static const nb::handle dtype_name = interned("dtype");
  const nb::object dtype = array.attr(dtype_name);
  for (const auto& [seen, type] : *known)
    if (seen == dtype.ptr()) return type;
  const std::string name = nb::cast<std::string>(nb::str(nb::object(dtype.attr("name"))));
  const auto type = dtype_named(name);
  const bool is_native = nb::cast<bool>(nb::object(dtype.attr("isnative")));
  const std::optional<DType> added =
      type && is_native && (*type == DType::bf16 || is_fp8(*type)) ? type : std::nullopt;
  if (known->size() < 64) known->emplace_back(nb::object(dtype).release().ptr(), added);
  return added;
}

std::string type_text(dlpack::Type type) {
  constexpr const char* kSized[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  constexpr const char* kNamed[] = {"float8_e3m4",     "float8_e4m3",     "float8_e4m3b11fnuz",
                                    "float8_e4m3fn",   "float8_e4m3fnuz", "float8_e5m2",
                                    "float8_e5m2fnuz", "float8_e8m0fnu",  "float6_e2m3fn",
                                    "float6_e3m2fn",   "float4_e2m1fn"};  // from 7 on
  std::string text;
  if (type.code < std::size(kSized))
    text = kSized[type.code] + std::to_string(type.bits);
  else if (type.code < std::size(kSized) + std::size(kNamed))
    text = kNamed[type.code - std::size(kSized)];
  else
    text = "unknown to longspan, of " + std::to_string(type.bits) + " bits";
  if (type.lanes != 1) text += " in vectors of " + std::to_string(type.lanes);
  return text;
}

std::string numpy_type_text(nb::handle array) {
  const nb::object dtype = array.attr("dtype");
  std::string text = nb::cast<std::string>(nb::str(nb::object(dtype.attr("name"))));
  if (!nb::object(dtype.attr("fields")).is_none()) return text + ", of several fields";
  return nb::cast<bool>(nb::object(dtype.attr("isnative"))) ? text
                                                            : text + " in the other byte order";
}

void refuse_type(const char* argument, const std::string& found) {
  throw InputError(std::string(argument) + " has elements of type " + found +
                   "; float32, float16, bfloat16, float8_e4m3fn and float8_e5m2 are supported, for "
                   "lengths and tables int32 and int64, for flags bool and uint8");
}

}  // namespace longspan::python
