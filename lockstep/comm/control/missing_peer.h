// SPDX-License-Identifier: Apache-2.0
// The likely cause, in errors of a rank that waits in vain for another. Private: not installed.
#pragma once

#include <string>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::comm {

// Calls `work`. An error because a peer has left, or did not come in time, ends with the hint; not
// where the peer has died, which is cause enough.
template <class Work>
decltype(auto) with_peer_hint(const std::string& hint, Work&& work) {
  const auto longer = [&hint](const Error& error) {
    const std::string text = error.what();
    const bool says_why =
        text.find(hint) != std::string::npos || text.find("has died") != std::string::npos;
    return says_why ? text : text + "; " + hint;
  };
  try {
    return std::forward<Work>(work)();
  } catch (const PeerLost& error) {
    throw PeerLost(error.rank(), longer(error));
  } catch (const TimeoutError& error) {
    throw TimeoutError(longer(error));
  }
}

}  // namespace lockstep::comm
