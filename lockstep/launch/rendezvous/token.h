// SPDX-License-Identifier: Apache-2.0
// The per-job secret that opens the rendezvous. It travels by an inherited descriptor, never by
// argv or environment, and never over the network: who has it proves that.
#pragma once

#include <string>

#include "lockstep/core/fd.h"

namespace lockstep::launch {

// 32 random bytes in hexadecimal.
std::string make_token();

// The token this process was given: from the descriptor LOCKSTEP_TOKEN_FD, else from the file
// LOCKSTEP_TOKEN_FILE, else from the variable LOCKSTEP_TOKEN; empty if there is none. Throws
// ConfigError where what is set cannot be read.
std::string token_from_environment();

// The first line of a file that only its owner may read. Throws ConfigError.
std::string token_from_file(const std::string& path);

// A sealed memory file with the token in it, close-on-exec.
Fd token_descriptor(const std::string& token);

}  // namespace lockstep::launch
