import dataclasses

from tilelab.records import gpus, results
from tilelab.runtime import device


def test_the_records_of_other_gpus_follow(monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    here = device.Device("NVIDIA H200", (9, 0), "sm_90a")
    there = device.Device("NVIDIA B200", (10, 0), "sm_100a")
    for each in (here, there, results.NO_GPU):
        kept = {"experiment": "speed", "device": dataclasses.asdict(each), "versions": {}, "source": "aaaa"}
        results.save(kept | {"recorded": "2026-11-21T04:50:17Z", "rows": [{"name": "plain", "status": "ok"}]})
    own = results.Record(results.load("speed", "nvidia-h200"), live=False)
    found = gpus.records_on_all_gpus(own)
    assert [record.device["name"] for record in found] == ["NVIDIA H200", "NVIDIA B200"]
