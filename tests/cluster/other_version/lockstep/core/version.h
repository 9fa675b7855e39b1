// SPDX-License-Identifier: Apache-2.0
// Stands before the real one in the path of a program that shall be of another version.
#pragma once

#define LOCKSTEP_VERSION "0.0.0"
