// SPDX-License-Identifier: Apache-2.0
// The table of backends. Each folder exports is_available() and create(); one that is not built is
// a stub of the two.
#include <mutex>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/backends/custom/custom_group.h"
#include "lockstep/comm/backends/gloo/gloo.h"
#include "lockstep/comm/backends/mpi/mpi.h"
#include "lockstep/comm/backends/nccl/nccl.h"
#include "lockstep/comm/backends/shm/shm.h"
#include "lockstep/comm/backends/thread/thread.h"
#include "lockstep/comm/conformance/conformance.h"
#include "lockstep/comm/strategy/strategy.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm {
namespace {

std::mutex mutex;

std::vector<detail::Backend>& table() {
  static std::vector<detail::Backend> backends{
      {"thread", thread::is_available, thread::create},
      {"shm", shm::is_available, shm::create},
      {"mpi", mpi::is_available, mpi::create, mpi::version},
      {"gloo", gloo::is_available, gloo::create},
      {"nccl", nccl::is_available, nccl::create, nccl::version, nccl::problem}};
  return backends;
}

const detail::Backend* lookup(const std::string& name) {
  for (const detail::Backend& backend : table()) {
    if (backend.name == name) return &backend;
  }
  return nullptr;
}

// A group of one: nothing to do, nothing to wait for.
class Alone final : public detail::GroupImpl {
 public:
  using GroupImpl::GroupImpl;
  std::shared_ptr<detail::Pending> submit(fabric::Operation, std::shared_ptr<const void>) override {
    throw std::logic_error("lockstep bug: an operation of a group of one reached its backend");
  }
  std::shared_ptr<std::byte> allocate(size_t) override { return nullptr; }
  bool reaches(const void*, size_t) const override { return true; }
};

}  // namespace

void register_backend(const std::string& name, TransportFactory create) {
  if (!create) throw ConfigError(format("[register_backend] '{}' has no factory function", name));
  detail::add_backend({name, [] { return true; },
                       [name, create = std::move(create)](detail::Membership membership) {
                         return detail::make_custom_group(std::move(membership), name, create);
                       }});
}

void detail::add_backend(Backend backend) {
  const std::lock_guard lock(mutex);
  const std::string& name = backend.name;
  if (name.empty() || name == "auto" || name == "none" || lookup(name) != nullptr) {
    throw ConfigError(format(
        "[register_backend] '{}' cannot be registered: the name is taken or reserved", name));
  }
  table().push_back(std::move(backend));
}

bool has_backend(const std::string& name) {
  const std::lock_guard lock(mutex);
  const detail::Backend* backend = lookup(name);
  return backend != nullptr && backend->is_available();
}

std::string backend_version(const std::string& name) {
  const detail::Backend& backend = detail::find_backend(name);
  return backend.version ? backend.version() : "";
}

const detail::Backend& detail::find_backend(const std::string& name) {
  const std::lock_guard lock(mutex);
  const Backend* backend = lookup(name);
  if (backend == nullptr) {
    std::vector<std::string> names{"auto"};
    for (const Backend& known : table()) names.push_back(known.name);
    throw ConfigError(format("unknown backend '{}'; available are {}", name, join(names)));
  }
  if (!backend->is_available()) {
    std::vector<std::string> usable{"auto"};
    for (const Backend& other : table()) {
      if (other.name != "thread" && other.is_available()) usable.push_back(other.name);
    }
    throw ConfigError(format(
        "backend '{}' {}; use {}{}", name,
        backend->problem ? "is not available: " + backend->problem() : "is not part of this build",
        join(usable), name == "nccl" ? ", or a build with CUDA (make build PRESET=cuda)" : ""));
  }
  return *backend;
}

std::shared_ptr<detail::GroupImpl> detail::make_group(Membership membership,
                                                      const std::string& backend) {
  if (membership.size() == 1 || membership.world->strategy == layout::CommStrategy::all_reduce)
    return make_plain_group(std::move(membership), backend);
  return strategy::create(std::move(membership), backend);
}

std::shared_ptr<detail::GroupImpl> detail::make_plain_group(Membership membership,
                                                            const std::string& backend) {
  if (backend == "none" ||
      (membership.size() == 1 && !membership.world->force_backend_on_single_rank))
    return std::make_shared<Alone>(std::move(membership), "none");
  const std::optional<Backend>& adopted = membership.world->adopted;
  const Backend& chosen = adopted && adopted->name == backend ? *adopted : find_backend(backend);
  const Factory create = chosen.create;
  return create(std::move(membership));
}

}  // namespace lockstep::comm
