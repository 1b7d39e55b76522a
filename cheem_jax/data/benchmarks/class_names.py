"""Class names in label order for the data sets whose archives hold no list of them."""

EUROSAT = tuple(
    """
    AnnualCrop Forest HerbaceousVegetation Highway Industrial Pasture PermanentCrop Residential River SeaLake
    """.split()
)

GTSRB = (
    "Speed limit (20km/h)",
    "Speed limit (30km/h)",
    "Speed limit (50km/h)",
    "Speed limit (60km/h)",
    "Speed limit (70km/h)",
    "Speed limit (80km/h)",
    "End of speed limit (80km/h)",
    "Speed limit (100km/h)",
    "Speed limit (120km/h)",
    "No passing",
    "No passing for vehicles over 3.5 metric tons",
    "Right-of-way at the next intersection",
    "Priority road",
    "Yield",
    "Stop",
    "No vehicles",
    "Vehicles over 3.5 metric tons prohibited",
    "No entry",
    "General caution",
    "Dangerous curve to the left",
    "Dangerous curve to the right",
    "Double curve",
    "Bumpy road",
    "Slippery road",
    "Road narrows on the right",
    "Road work",
    "Traffic signals",
    "Pedestrians",
    "Children crossing",
    "Bicycles crossing",
    "Beware of ice/snow",
    "Wild animals crossing",
    "End of all speed and passing limits",
    "Turn right ahead",
    "Turn left ahead",
    "Ahead only",
    "Go straight or right",
    "Go straight or left",
    "Keep right",
    "Keep left",
    "Roundabout mandatory",
    "End of no passing",
    "End of no passing by vehicles over 3.5 metric tons",
)

# The folder names in lower case, sorted.
CALTECH101 = tuple(
    """
    accordion airplanes anchor ant background_google barrel bass beaver binocular bonsai brain brontosaurus
    buddha butterfly camera cannon car_side ceiling_fan cellphone chair chandelier cougar_body cougar_face crab
    crayfish crocodile crocodile_head cup dalmatian dollar_bill dolphin dragonfly electric_guitar elephant emu
    euphonium ewer faces faces_easy ferry flamingo flamingo_head garfield gerenuk gramophone grand_piano
    hawksbill headphone hedgehog helicopter ibis inline_skate joshua_tree kangaroo ketch lamp laptop leopards
    llama lobster lotus mandolin mayfly menorah metronome minaret motorbikes nautilus octopus okapi pagoda panda
    pigeon pizza platypus pyramid revolver rhino rooster saxophone schooner scissors scorpion sea_horse snoopy
    soccer_ball stapler starfish stegosaurus stop_sign strawberry sunflower tick trilobite umbrella watch
    water_lilly wheelchair wild_cat windsor_chair wrench yin_yang
    """.split()
)
