/* Stands in for NVIDIA's libnvidia-ml.so.1 in tests: two scripted devices, with the calls that steelyard makes of it.
 *
 * -DOLD_DRIVER leaves out what only newer drivers have, -DBARE all but finding devices. FAKE_NVML_INIT is the answer of
 * init, FAKE_NVML_PROCESSES the number of compute processes on each device. Types as in nvml.h. */

#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, TOO_SMALL = 7 };

typedef struct {
    const char *name, *uuid;
    unsigned long long total, used, energy_mj, reasons;
    unsigned int sm_mhz, memory_mhz, power_mw, temperature_c;
} Device;

static Device devices[2] = {
    {"NVIDIA H200", "GPU-aaaa0000-0000-0000-0000-000000000000", 150754820096ULL, 1000, 5000000, 0x4, 1980, 3201, 650500, 61},
    {"NVIDIA H200", "GPU-aabb1111-0000-0000-0000-000000000000", 150754820096ULL, 2000, 0, 0x88, 1200, 2619, 300250, 85},
};

static int number(const char *variable) {
    const char *text = getenv(variable);
    return text ? atoi(text) : 0;
}

int nvmlInitWithFlags(unsigned int flags) { return number("FAKE_NVML_INIT"); }
int nvmlShutdown(void) { return OK; }

int nvmlSystemGetDriverVersion(char *out, unsigned int length) {
    strncpy(out, "570.86.15", length);
    return OK;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    *count = 2;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **out) {
    if (index >= 2) return INVALID;
    *out = &devices[index];
    return OK;
}

int nvmlDeviceGetName(Device *device, char *out, unsigned int length) {
    strncpy(out, device->name, length);
    return OK;
}

int nvmlDeviceGetUUID(Device *device, char *out, unsigned int length) {
    strncpy(out, device->uuid, length);
    return OK;
}

#ifndef BARE

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned int version, sensor; int celsius; } Temperature;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } Process;

/* The older call counts the driver's own reserve of 512 bytes as used. */
int nvmlDeviceGetMemoryInfo(Device *device, Memory *out) {
    *out = (Memory){device->total, device->total - device->used - 512, device->used + 512};
    return OK;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *out) {
    out->used = device->used;
    return OK;
}

int nvmlDeviceGetTemperatureV(Device *device, Temperature *out) {
    out->celsius = (int)device->temperature_c;
    return OK;
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *out) {
    *out = device->reasons;
    return OK;
}
#endif

int nvmlDeviceGetTemperature(Device *device, unsigned int sensor, unsigned int *out) {
    *out = device->temperature_c + 1;
    return OK;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *out) {
    *out = device->reasons | 0x1;
    return OK;
}

int nvmlDeviceGetClockInfo(Device *device, unsigned int clock, unsigned int *out) {
    *out = clock == 1 ? device->sm_mhz : device->memory_mhz;
    return OK;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned int *out) {
    *out = device->power_mw;
    return OK;
}

/* Rises by half a joule a reading on the first device; the second has no such counter. */
int nvmlDeviceGetTotalEnergyConsumption(Device *device, unsigned long long *out) {
    if (!device->energy_mj) return NOT_SUPPORTED;
    *out = device->energy_mj;
    device->energy_mj += 500;
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned int *count, Process *out) {
    unsigned int running = (unsigned int)number("FAKE_NVML_PROCESSES"), room = *count;
    *count = running;
    if (running && room < running) return TOO_SMALL;
    for (unsigned int i = 0; i < running; i++) out[i] = (Process){100 + i, 1 << 20, 0, 0};
    return OK;
}

#endif
