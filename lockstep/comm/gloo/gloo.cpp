#include "lockstep/comm/gloo/gloo.h"

#include <set>

#include "lockstep/comm/gloo/no_sigpipe.h"
#include "lockstep/comm/gloo/process_group.h"
#include "lockstep/comm/gloo/store_adapter.h"
#include "lockstep/core/error.h"
#include "lockstep/launch/interface.h"

namespace lockstep::comm::gloo {

bool is_available() { return true; }

std::shared_ptr<detail::GroupImpl> create(detail::Membership membership) {
  try {
    const NoSigpipe no_signal;  // for the threads that Gloo starts now
    const detail::World& world = *membership.world;
    auto options = c10d::ProcessGroupGloo::Options::create(world.timeout);
    std::set<int> hosts;
    for (const int member : membership.members)
      hosts.insert(world.hosts[static_cast<size_t>(member)]);
    // torch's own variable; LOCKSTEP_INTERFACE is in the address already.
    const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
    if (!launch::interface_from_environment().empty()) interface = nullptr;
    options->devices.push_back(
        interface != nullptr ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
                             : c10d::ProcessGroupGloo::createDeviceForHostname(
                                   hosts.size() == 1 ? std::string("127.0.0.1") : world.address));
    auto engine = c10::make_intrusive<c10d::ProcessGroupGloo>(
        c10::make_intrusive<StoreAdapter>(world.store, "gloo/" + membership.name + "/",
                                          world.timeout),
        membership.rank, membership.size(), options);
    return make_process_group(std::move(membership), "gloo", std::move(engine));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const std::string words = error.what();
    throw CommError("[init] gloo could not connect the group: " +
                    words.substr(0, words.find('\n')));
  }
}

}  // namespace lockstep::comm::gloo
