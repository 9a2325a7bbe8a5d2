#include "python/src/communicators.hpp"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "longspan/error.hpp"
#include "python/src/arrays.hpp"
#include "python/src/errors.hpp"
#include "python/src/words.hpp"
#if defined(LONGSPAN_PYTHON_MPI)
#include "longspan/mpi.hpp"
#endif

namespace longspan::python {
namespace {

/// All communicators, so that they end before the interpreter does. Under the GIL.
std::vector<Comm*>& all() {
  static auto* const comms = new std::vector<Comm*>;
  return *comms;
}

struct Default {
  Device device;
  int gpu;
  nb::object comm;
};
std::vector<Default>& defaults() {
  static auto* const made = new std::vector<Default>;
  return *made;
}

/// Ctrl-C: Python's own handler runs now, and the call raises its exception (errors.cpp).
bool interrupted() {
  const nb::gil_scoped_acquire acquired;
  return PyErr_CheckSignals() != 0;
}

Device device_of(nb::handle given) {
  const std::string asked = text(given, "device");
  if (asked == "cpu") return Device::host;
  if (asked == "cuda") return Device::cuda;
  throw InputError("device is '" + asked + "'; 'cpu' and 'cuda' are supported");
}

CommOptions options_of(nb::handle device, nb::handle gpu, nb::handle deadline) {
  CommOptions options{.device = device_of(device), .on_wait = interrupted};
  if (!gpu.is_none()) options.gpu = small(integer(gpu, "gpu"), "gpu");
  if (!deadline.is_none()) {
    const double seconds = real(deadline, "deadline");
    if (!(seconds > 0 && seconds < 1e9))
      throw InputError("deadline is " + std::to_string(seconds) + " s; a positive time is wanted");
    options.deadline =
        std::chrono::milliseconds(std::max<std::int64_t>(1, std::llround(seconds * 1e3)));
  }
  return options;
}

template <class Make>
nb::object made(Make&& make) {
  std::optional<Communicator> world;
  {
    const nb::gil_scoped_release released;
    world.emplace(make());
  }
  return nb::cast(std::make_unique<Comm>(*std::move(world)).release(),
                  nb::rv_policy::take_ownership);
}

nb::object alone_with(Argument<"device"> device, Argument<"gpu"> gpu) {
  const CommOptions options = options_of(device, gpu, nb::none());
  return made([&] { return self(options.device, options.gpu); });
}

nb::object environment_with(Argument<"device"> device, Argument<"gpu"> gpu,
                            Argument<"deadline"> deadline) {
  const CommOptions options = options_of(device, gpu, deadline);
  return made([&] { return from_environment(options); });
}

/// `exchange`: bytes -> list of bytes, every rank's in rank order. Its own exceptions pass.
nb::object exchange_with(Argument<"rank"> rank, Argument<"size"> size,
                         Argument<"exchange"> exchange, Argument<"device"> device,
                         Argument<"gpu"> gpu, Argument<"deadline"> deadline) {
  const CommOptions options = options_of(device, gpu, deadline);
  constexpr std::int64_t kMost = 1 << 20;
  const std::int64_t ranks = integer(size), own = integer(rank);
  if (ranks < 1 || ranks > kMost)
    throw InputError("size is " + std::to_string(ranks) + "; there are 1 to 2^20 ranks");
  if (own < 0 || own >= ranks)
    throw InputError("rank is " + std::to_string(own) + "; of " + std::to_string(ranks) +
                     " ranks there are 0 to " + std::to_string(ranks - 1));
  if (!PyCallable_Check(exchange.ptr()))
    wrong_type(exchange, "exchange", "a function from bytes to the list of every rank's bytes");
  const auto gather = [&](const std::string& mine) {
    const nb::gil_scoped_acquire acquired;
    const nb::object returned = exchange(nb::bytes(mine.data(), mine.size()));
    if (!PyList_Check(returned.ptr()) && !PyTuple_Check(returned.ptr()))
      wrong_type(returned, "what exchange returns", "a list of bytes");
    std::vector<std::string> texts;
    for (nb::handle one : returned) {
      if (!PyBytes_Check(one.ptr())) wrong_type(one, "what exchange returns", "a list of bytes");
      const nb::bytes text = nb::borrow<nb::bytes>(one);
      texts.emplace_back(static_cast<const char*>(text.data()), text.size());
    }
    return texts;
  };
  return made([&] {
    return from_exchange(static_cast<int>(own), static_cast<int>(ranks), gather, options);
  });
}

#if defined(LONGSPAN_PYTHON_MPI)
std::string mpi_library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  return text;
}

/// mpi4py may run on another MPI than this module, or on another copy of it: its communicators are
/// then invalid here.
void check_same_mpi(nb::handle mpi) {
  std::string theirs = nb::cast<std::string>(nb::object(mpi.attr("Get_library_version")()));
  std::string ours = mpi_library();
  for (std::string* text : {&theirs, &ours})
    *text = text->substr(0, text->find_first_of(std::string_view("\n\0", 2)));
  const auto world =
      nb::cast<std::uintptr_t>(nb::object(mpi.attr("_handleof")(mpi.attr("COMM_WORLD"))));
  if (theirs == ours && world == (std::uintptr_t)MPI_COMM_WORLD) return;
  throw UsageError("comm is of mpi4py on " + theirs + ", and longspan was built with " + ours +
                   (theirs == ours ? ", another copy of it" : "") +
                   ": install mpi4py for the MPI that longspan was built with, or build longspan "
                   "with the other (MPICC, -DMPI_HOME), or use from_exchange");
}
#endif

nb::object mpi4py_with(Argument<"comm"> comm, Argument<"device"> device, Argument<"gpu"> gpu,
                       Argument<"deadline"> deadline) {
  const CommOptions options = options_of(device, gpu, deadline);
  const nb::object modules = nb::borrow(PyImport_GetModuleDict());
  const nb::object mpi = nb::object(modules.attr("get")("mpi4py.MPI"));
  if (mpi.is_none() || !nb::isinstance(comm, nb::object(mpi.attr("Comm"))))
    wrong_type(comm, "comm", "a communicator of mpi4py");
#if defined(LONGSPAN_PYTHON_MPI)
  check_same_mpi(mpi);
  const auto handle = nb::cast<std::uintptr_t>(nb::object(mpi.attr("_handleof")(comm)));
  return made([&] { return from_mpi((MPI_Comm)handle, options); });
#else
  throw Unsupported(
      "this longspan was built without MPI: build it where MPI is found (Debian: "
      "libopenmpi-dev), or use from_exchange");
#endif
}

nb::list gathered(Comm& comm, nb::handle mine, nb::handle step) {
  if (!PyBytes_Check(mine.ptr())) wrong_type(mine, "mine", "bytes");
  const nb::bytes given = nb::borrow<nb::bytes>(mine);
  const std::string text(static_cast<const char*>(given.data()), given.size());
  const std::string name = python::text(step, "step");
  const auto all_texts =
      comm.alone([&](const Communicator& world) { return world.gather(text, name); });
  nb::list made;
  for (const std::string& one : all_texts) made.append(nb::bytes(one.data(), one.size()));
  return made;
}

nb::object split(Comm& comm, nb::handle color, nb::handle key) {
  const auto number = [](nb::handle given, const char* name) {
    const std::int64_t value = integer(given, name);
    if (value != static_cast<std::int32_t>(value))
      throw InputError(std::string(name) + " is " + std::to_string(value) +
                       "; -2^31 to 2^31 - 1 are possible");
    return static_cast<int>(value);
  };
  const int own = number(color, "color"), place = number(key, "key");
  auto part = comm.alone([&](const Communicator& world) { return world.split(own, place); });
  if (!part) return nb::none();
  return nb::cast(std::make_unique<Comm>(*std::move(part)).release(),
                  nb::rv_policy::take_ownership);
}

nb::str repr(Comm& comm) {
  try {
    const Communicator& world = comm.world();
    return python_text("<longspan.Communicator rank " + std::to_string(world.rank()) + " of " +
                       std::to_string(world.size()) + ", " + device_name(world.device()) + ": " +
                       world.describe() + ">");
  } catch (const UsageError&) {
    return python_text("<longspan.Communicator, closed>");
  }
}

}  // namespace

Comm::Comm(Communicator world) : world_(std::move(world)) {
  all().push_back(this);
  if (world_->size() > 1) world_->on_wait(interrupted);
}

Comm::~Comm() {
  std::erase(all(), this);
  close();
}

const Communicator& Comm::world() const {
  if (!world_) throw UsageError(std::string("comm cannot be used: ") + gone_);
  return *world_;
}

void Comm::close() {
  if (!world_) return;
  const std::shared_ptr<std::mutex> mutex = mutex_;
  const nb::gil_scoped_release released;
  const std::lock_guard lock(*mutex);
  kept_layers_->clear();
  world_.reset();
}

void Comm::forked() {
  static_cast<void>(kept_layers_.release());  // their threads are not here to be ended
  kept_layers_ = std::make_unique<KeptLayers>();
  mutex_ = std::make_shared<std::mutex>();
  if (!world_) return;
  const bool is_alone = world_->size() == 1 && world_->device() == Device::host;
  static_cast<void>(new Communicator(*world_));  // the parent ends it
  world_.reset();
  gone_ = "it was made before a fork; make one in the new process";
  if (is_alone) world_.emplace(self());
}

nb::object default_comm(Device device, int gpu) {
  for (const Default& known : defaults())
    if (known.device == device && known.gpu == gpu) return known.comm;
  nb::object comm = made([&] { return self(device, gpu); });
  defaults().push_back({device, gpu, comm});
  return comm;
}

Comm& comm_of(nb::handle given) {
  Comm* comm = nullptr;
  if (!nb::try_cast<Comm*>(given, comm) || comm == nullptr)
    wrong_type(given, "comm", "a longspan.Communicator");
  return *comm;
}

nb::object comm_or_default(nb::handle given, Device device, int gpu) {
  if (given.is_none()) return default_comm(device, gpu);
  comm_of(given);
  return nb::borrow(given);
}

void bind_communicators(nb::module_& m) {
  nb::class_<Comm>(m, "Communicator", nb::is_weak_referenceable(),
                   "Who computes together; see alone and from_environment.")
      .def_prop_ro(
          "rank", [](Comm& c) { return c.world().rank(); }, "This rank, from 0 on.")
      .def_prop_ro(
          "size", [](Comm& c) { return c.world().size(); }, "How many ranks there are.")
      .def_prop_ro(
          "device", [](Comm& c) { return device_name(c.world().device()); },
          "'cpu' or 'cuda': where the arrays of calls lie.")
      .def_prop_ro(
          "gpu",
          [](Comm& c) -> nb::object {
            const int gpu = c.world().gpu();
            return gpu < 0 ? nb::none() : nb::object(nb::int_(gpu));
          },
          "This rank's GPU, as CUDA counts them; None on CPUs.")
      .def_prop_ro(
          "deadline",
          [](Comm& c) { return static_cast<double>(c.world().deadline().count()) / 1e3; },
          "Seconds that a rank waits for another at most.")
      .def_prop_ro(
          "received_bytes", [](Comm& c) { return c.world().received_bytes(); },
          "Bytes of queries, keys, states and gradients that this rank has received since the\n"
          "communicator was made. CPUs count them as they arrive, GPUs as transfers are queued.")
      .def(
          "describe", [](Comm& c) { return python_text(c.world().describe()); },
          "One line for people.")
      .def("gather", &gathered, nb::arg("mine").none(), nb::arg("step") = "gather",
           "Every rank's bytes, in rank order. Collective: it waits for every rank, at most for "
           "the\n"
           "deadline; who does not come is named in a RankError, with `step`.")
      .def(
          "barrier",
          [](Comm& c, nb::handle step) {
            const std::string name = text(step, "step");
            c.alone([&](const Communicator& world) { world.barrier(name); });
          },
          nb::arg("step") = "barrier", "Returns when every rank has come here.")
      .def("split", &split, nb::arg("color").none(), nb::arg("key") = 0,
           "The ranks that give the same color, as a communicator of their own, ordered by their\n"
           "keys; None where color is below 0. Collective.")
      .def(
          "wait",
          [](Comm& c, nb::handle stream) {
            Stream queue;
            if (!stream.is_none())
              queue.handle =
                  reinterpret_cast<void*>(static_cast<std::uintptr_t>(integer(stream, "stream")));
            c.alone([&](const Communicator&) { c.kept_layers().wait(queue); });
          },
          nb::arg("stream") = nb::none(),
          "Waits until what attend() has queued on the stream is done, and raises what went wrong\n"
          "meanwhile. On CPUs there is nothing to wait for.")
      .def(
          "abort",
          [](Comm& c, nb::handle why) {
            const std::string reason = text(why, "why");
            const Communicator world = c.world();
            const nb::gil_scoped_release released;
            world.abort(reason);
          },
          nb::arg("why").none(),
          "Tells the others that this rank gives up, so that they end at once.")
      .def("close", &Comm::close,
           "Leaves the communicator. What is left open ends with the process.")
      .def_prop_ro(
          "plans", [](Comm& c) { return c.kept_layers().size(); },
          "How many layers attend() keeps for it.")
      .def("__repr__", &repr);

  def_by_name(m, "alone", &alone_with);
  def_by_name(m, "from_environment", &environment_with);
  def_by_name(m, "from_exchange", &exchange_with);
  def_by_name(m, "from_mpi4py", &mpi4py_with);
  m.def("launched_rank", &launched_rank);
  m.def("close_all", [] {
    defaults().clear();
    const std::vector<Comm*> open = all();
    for (Comm* comm : open) comm->close();
  });
  m.def("after_fork", [] {
    for (Comm* comm : all()) comm->forked();
  });
}

}  // namespace longspan::python
