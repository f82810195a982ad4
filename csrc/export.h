// Marks the functions of libqkv_core.so that others may call. All other functions in it are hidden.
#pragma once

#define QKV_CORE_API __attribute__((visibility("default")))
