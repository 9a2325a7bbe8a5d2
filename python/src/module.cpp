// The extension module longspan._core: thin functions that take every argument by name. The
// public functions, with names, defaults and documentation, are in python/longspan/*.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "longspan/info.hpp"
#include "longspan/strategy.hpp"
#include "longspan/version.hpp"
#include "python/src/attention.hpp"
#include "python/src/communicators.hpp"
#include "python/src/errors.hpp"
#include "python/src/layer.hpp"
#include "python/src/names.hpp"
#include "python/src/reshard.hpp"
#include "python/src/serving.hpp"
#include "python/src/shards.hpp"

namespace nb = nanobind;

namespace longspan::python {
namespace {

nb::dict info() {
  nb::dict made;
  for (const auto& [name, value] : system_info())
    made[name.c_str()] = python_text(name == "CUDA" ? with_python_names(value) : value);
  return made;
}

nb::list feature_rows() {
  nb::list rows;
  for (const FeatureInfo& f : features()) {
    nb::dict row;
    row["name"] = f.name;
    row["meaning"] = f.meaning;
    row["by"] = f.by;
    row["cpu"] = f.host;
    row["cuda"] = f.cuda;
    rows.append(row);
  }
  return rows;
}

nb::list environment_rows() {
  nb::list rows;
  for (const EnvironmentVariable& v : environment()) {
    nb::dict row;
    row["name"] = v.name;
    row["value"] = python_text(v.value);
    row["default"] = v.standard;
    row["meaning"] = v.meaning;
    rows.append(row);
  }
  return rows;
}

nb::list strategy_names() {
  nb::list names;
  for (const StrategyInfo& s : strategies()) names.append(s.name);
  return names;
}

}  // namespace
}  // namespace longspan::python

NB_MODULE(_core, m) {
  using namespace longspan::python;
  nb::set_leak_warnings(false);  // what is kept for the next call is not a leak
  translate_errors();
  bind_shards(m);
  bind_communicators(m);
  bind_attention(m);
  bind_layer(m);
  bind_serving(m);
  bind_reshard(m);
  m.def("info", &info);
  m.def("features", &feature_rows);
  m.def("environment", &environment_rows);
  m.def("strategies", &strategy_names);
  m.attr("__version__") = LONGSPAN_VERSION;
#if defined(LONGSPAN_PYTHON_MPI)
  m.attr("has_mpi") = true;
#else
  m.attr("has_mpi") = false;
#endif
#if defined(LONGSPAN_HAVE_CUDA)
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
}
