// SPDX-License-Identifier: Apache-2.0
// The version of Lockstep; the build reads it from here.
#pragma once

#define LOCKSTEP_VERSION "0.1.0"
