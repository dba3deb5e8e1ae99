// All of Ebb's public face.
#pragma once

#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/parameter_files.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/engine.h"
#include "ebb/sharding/mesh.h"
#include "ebb/sharding/model.h"
