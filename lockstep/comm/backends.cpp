// The table of backends. Each folder exports is_available() and create(); one that is not built is
// a stub of the two.
#include <mutex>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/custom_backend.h"
#include "lockstep/comm/gloo/gloo.h"
#include "lockstep/comm/mpi/mpi.h"
#include "lockstep/comm/shm/shm.h"
#include "lockstep/comm/thread/thread.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm {
namespace {

std::mutex mutex;

std::vector<detail::Backend>& table() {
  static std::vector<detail::Backend> backends{{"thread", thread::is_available, thread::create},
                                               {"shm", shm::is_available, shm::create},
                                               {"mpi", mpi::is_available, mpi::create},
                                               {"gloo", gloo::is_available, gloo::create}};
  return backends;
}

const detail::Backend* lookup(const std::string& name) {
  for (const detail::Backend& backend : table()) {
    if (backend.name == name) return &backend;
  }
  return nullptr;
}

}  // namespace

void register_backend(const std::string& name, detail::Factory create) {
  const std::lock_guard lock(mutex);
  if (name.empty() || name == "auto" || lookup(name) != nullptr) {
    throw ConfigError(format(
        "[register_backend] '{}' cannot be registered: the name is taken or reserved", name));
  }
  table().push_back({name, [] { return true; }, std::move(create)});
}

bool has_backend(const std::string& name) {
  const std::lock_guard lock(mutex);
  const detail::Backend* backend = lookup(name);
  return backend != nullptr && backend->is_available();
}

const detail::Backend& detail::find_backend(const std::string& name) {
  const std::lock_guard lock(mutex);
  const Backend* backend = lookup(name);
  if (backend == nullptr) {
    std::vector<std::string> names{"auto"};
    for (const Backend& known : table()) names.push_back(known.name);
    throw ConfigError(format("backend '{}' is not known; there are {}", name, join(names)));
  }
  if (!backend->is_available())
    throw ConfigError(format("backend '{}' is not part of this build", name));
  return *backend;
}

}  // namespace lockstep::comm
