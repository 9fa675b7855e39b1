// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/control/abort.h"

#include <exception>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/control/operation_watchdog.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {

void abort(const Group& group, const std::string& why) {
  if (group.size() == 1 || interrupt(group, why)) return;
  detail::tell_failure(*detail::impl_of(group).membership().world->store, group.name(),
                       group.rank(), std::make_exception_ptr(CommError(why)));
}

bool interrupt(const Group& group, const std::string& why) {
  return detail::impl_of(group).abort(why);
}

}  // namespace lockstep::comm
