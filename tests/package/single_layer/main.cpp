// SPDX-License-Identifier: Apache-2.0
#include <iostream>

#include "lockstep/core/version.h"
#include "lockstep/launch/rendezvous/store.h"

int main() {
  lockstep::launch::LocalStore store;
  std::cout << LOCKSTEP_VERSION " count of " << store.add("count", 64) << std::endl;
}
