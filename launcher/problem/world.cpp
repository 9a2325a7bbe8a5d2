#include "launcher/problem/world.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <exception>
#include <map>
#include <optional>
#include <sstream>

#include "launcher/io/speech.hpp"
#include "longspan/info.hpp"

namespace longspan::launcher {
namespace {

Communicator cuda_world(const Communicator& control, const CommOptions& options) {
  std::optional<Communicator> world;
  together(control, "start of the GPUs", [&] {
    world = from_environment(options);
    world->make_current();  // for what the command itself allocates and launches
  });
  return *world;
}

}  // namespace

void together(const Communicator& world, const std::string& step,
              const std::function<void()>& work) {
  std::string mine;        // empty, or "<kind> <message>"
  std::exception_ptr own;  // may have ended the communicator, so that no message can follow
  const auto keep = [&mine](ErrorKind kind, const char* what) {
    mine = fmt::format("{} {}", static_cast<int>(kind), what);
  };
  try {
    work();
  } catch (const RankError&) {
    throw;  // since the ranks can no longer be asked
  } catch (const SharedError&) {
    throw;  // since they know it already
  } catch (const Error& error) {
    own = std::current_exception();
    keep(error.kind(), error.what());
  } catch (const std::bad_alloc&) {
    keep(ErrorKind::backend, "not enough memory");
  } catch (const std::exception& error) {
    keep(ErrorKind::internal, error.what());
  }

  std::vector<std::string> all;
  try {
    all = world.gather(mine, step);
  } catch (const Error&) {
    if (own) std::rethrow_exception(own);
    throw;
  }
  std::size_t failed = 0, first = all.size();
  bool same = true;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    same = same && all[rank] == all[0];
    if (all[rank].empty()) continue;
    first = std::min(first, rank);
    ++failed;
  }
  if (failed == 0) return;
  std::istringstream text(all[first]);
  int kind = 1;
  std::string message;
  text >> kind >> std::ws;
  message.assign(std::istreambuf_iterator<char>(text), {});
  if (!same)
    message = fmt::format("rank {}: {}{}", first, message,
                          failed > 1 ? fmt::format(" (and {} more ranks failed)", failed - 1) : "");
  throw SharedError(static_cast<ErrorKind>(kind), message);
}

void tell(const Communicator& world, const std::function<std::string()>& text, std::FILE* to) {
  together(world, "writing to standard output", [&] {
    if (world.rank() == 0) print(text(), to);
  });
}

void on_first_rank(const Communicator& world, const std::string& step,
                   const std::function<void(const Pulse& pulse)>& work) {
  const std::string more = "more";
  std::optional<Error> failure;
  if (world.rank() == 0) {
    auto last = std::chrono::steady_clock::now();
    const Pulse pulse = [&] {
      const auto now = std::chrono::steady_clock::now();
      if (now - last < world.deadline() / 8) return;
      world.gather(more, step);
      last = now;
    };
    try {
      work(pulse);
    } catch (const RankError&) {
      throw;
    } catch (const Error& error) {
      failure.emplace(error.kind(), error.what());
    } catch (const std::bad_alloc&) {
      failure.emplace(ErrorKind::backend, "not enough memory");
    } catch (const std::exception& error) {
      failure.emplace(ErrorKind::internal, error.what());
    }
    world.gather("", step);
  } else {
    while (world.gather("", step)[0] == more) continue;
  }
  together(world, step, [&] {
    if (failure) throw Error(*failure);
  });
}

Communicator control_world(const WorldOptions& options) {
  return from_environment({.device = Device::host, .deadline = options.deadline()});
}

Communicator world_for(const Communicator& control, const WorldOptions& options) {
  if (options.backend == "host") return control;

  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  std::map<std::string, int> ranks_on;  // by host and its number of GPUs
  for (const std::string& text :
       control.gather(fmt::format("{} {}", gpu_count(), host.data()), "count of GPUs"))
    ++ranks_on[text];
  bool none = false, enough = true;
  for (const auto& [text, ranks] : ranks_on) {
    const int gpus = std::stoi(text);
    none = none || gpus == 0;
    enough = enough && gpus >= ranks;
  }

  const CommOptions on_gpu{.device = Device::cuda, .deadline = options.deadline()};
  if (options.backend == "auto") return enough ? cuda_world(control, on_gpu) : control;
#if defined(LONGSPAN_HAVE_CUDA)
  if (none)
    throw SharedError(ErrorKind::unsupported,
                      fmt::format("--backend {} was asked for, and no GPU was found; use --backend "
                                  "host, or see `longspan info`",
                                  options.backend));
#else
  throw SharedError(ErrorKind::unsupported,
                    "--backend cuda was asked for, and this build has no CUDA; use --backend host, "
                    "or configure with -DLONGSPAN_CUDA=ON");
#endif
  return cuda_world(control, on_gpu);
}

}  // namespace longspan::launcher
