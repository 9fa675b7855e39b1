// The version of Lockstep; the build reads it from here.
#pragma once

#define LOCKSTEP_VERSION "0.1.0"
