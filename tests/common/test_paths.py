"""The folders that fedsweep uses outside of the results folder."""

from fedsweep.common.paths import mirror_folder


def test_each_remote_store_has_a_folder_of_its_own_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path))
    here, there = mirror_folder("s3://bucket/here"), mirror_folder("s3://bucket/there")
    assert mirror_folder("s3://bucket/here") == here != there
    assert tmp_path in here.parents
    assert len(here.name) == 16, "an existing copy is found again by later versions"
