"""Requests and responses of the HTTP interface."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_RESULTS = 1000
MAX_IDS = 100
MAX_CHARACTERS = 32_768
MAX_CONDITIONS = 32

Text = Annotated[str, Field(max_length=MAX_CHARACTERS, description="text to search with")]
Ids = Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=MAX_IDS, description="more like these")]
Conditions = Annotated[
    list[Annotated[str, Field(max_length=4096)]],
    Field(max_length=MAX_CONDITIONS, description='such as year>=2020, lang=en,de or author="Doe, Jane"; all must hold'),
]
Filter = Annotated[str, Field(max_length=MAX_CHARACTERS, description="of an engine, in its own language: SQL or JSON")]


class SearchRequest(BaseModel):
    """What to search with: a text, or ids of the index."""

    model_config = ConfigDict(extra="forbid")
    text: Text | None = None
    ids: Ids = []
    k: Annotated[int, Field(ge=1, le=MAX_RESULTS, description="how many results")] = 10
    where: Conditions = []
    filter: Filter = ""
    hybrid: Annotated[
        Literal["rrf", "weighted"] | None, Field(description="fuse with BM25, by reciprocal ranks or weighted scores")
    ] = None
    weight: Annotated[float, Field(ge=0, le=1, description="of the vectors in hybrid; BM25 has the rest")] = 0.5
    rerank: Annotated[
        bool | None, Field(description="score the best again by the cross-encoder; by default if there is one")
    ] = None

    @field_validator("text")
    @classmethod
    def _not_blank(cls, text: str | None) -> str | None:
        if text is not None and not text.strip():
            raise ValueError("the text is empty")
        return text


class SearchLink(SearchRequest):
    """The same in the query of a link, where `id` may repeat and unknown parameters are ignored."""

    model_config = ConfigDict(extra="ignore")
    ids: Ids = Field(default=[], alias="id")


class Result(BaseModel):
    """One item of the index."""

    rank: int
    id: str
    score: float
    snippet: str = ""
    columns: dict[str, Any] = {}


class SearchResponse(BaseModel):
    """The best items, best first."""

    results: list[Result]
    took_ms: float
    generation: int


class EmbeddingsRequest(BaseModel):
    """OpenAI's request, and which side of the model is to encode."""

    model_config = ConfigDict(extra="ignore")
    input: str | list[str]
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    input_type: Annotated[
        Literal["query", "document"], Field(description="not OpenAI's: which side of a query-document model encodes")
    ] = "query"
