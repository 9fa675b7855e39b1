// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/gloo/gloo.h"

#include "lockstep/comm/backends/gloo/connect.h"
#include "lockstep/comm/backends/gloo/no_sigpipe.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::gloo {

bool is_available() { return true; }

std::shared_ptr<detail::GroupImpl> create(detail::Membership membership) {
  try {
    const NoSigpipe no_signal;  // for the threads that Gloo starts now
    auto engine = connect(membership);
    const auto set_tag = [gloo = engine.get()](uint32_t tag) { gloo->set_tag(tag); };
    return make_process_group(std::move(membership), "gloo", std::move(engine), set_tag);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const std::string words = error.what();
    throw CommError("[init] gloo could not connect the group: " +
                    words.substr(0, words.find('\n')));
  }
}

}  // namespace lockstep::comm::gloo
