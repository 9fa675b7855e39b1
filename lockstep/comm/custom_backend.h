// A user's own backend: registered by name, then chosen like any other with InitOptions::backend.
#pragma once

#include <string>

#include "lockstep/comm/backend.h"

namespace lockstep::comm {

// The factory is called for the world and again for every split. A name can be registered once.
// This table is process-wide state because names are: register before the first init(), from one
// place.
void register_backend(const std::string& name, detail::Factory create);

}  // namespace lockstep::comm
