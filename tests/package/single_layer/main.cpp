// SPDX-License-Identifier: Apache-2.0
#include <iostream>

#include "lockstep/core/version.h"
#include "lockstep/launch/rendezvous/token.h"

int main() {
  std::cout << LOCKSTEP_VERSION " token of " << lockstep::launch::make_token().size() << std::endl;
}
